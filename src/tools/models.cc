#include "tools/models.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace turnout::tools {

namespace {

// Each line repeats what the publisher's config.json of the model says under the keys named.
constexpr std::array kModels = {
    Model{"DeepSeek-V3", 256, 8, 7168, "deepseek-ai/DeepSeek-V3 config.json: n_routed_experts, num_experts_per_tok, hidden_size"},
    Model{"DeepSeek-V4-Pro", 384, 6, 7168, "deepseek-ai/DeepSeek-V4-Pro config.json: n_routed_experts, num_experts_per_tok, hidden_size"},
    Model{"DeepSeek-V2-Lite", 64, 6, 2048, "deepseek-ai/DeepSeek-V2-Lite config.json: n_routed_experts, num_experts_per_tok, hidden_size"},
    Model{"Kimi-K2", 384, 8, 7168, "moonshotai/Kimi-K2-Instruct config.json: n_routed_experts, num_experts_per_tok, hidden_size"},
    Model{"Qwen3-235B-A22B", 128, 8, 4096, "Qwen/Qwen3-235B-A22B config.json: num_experts, num_experts_per_tok, hidden_size"},
    Model{"Qwen3-30B-A3B", 128, 8, 2048, "Qwen/Qwen3-30B-A3B config.json: num_experts, num_experts_per_tok, hidden_size"},
    Model{"Mixtral-8x7B", 8, 2, 4096, "mistralai/Mixtral-8x7B-v0.1 config.json: num_local_experts, num_experts_per_tok, hidden_size"},
    Model{"gpt-oss-120b", 128, 4, 2880, "openai/gpt-oss-120b config.json: num_local_experts, num_experts_per_tok, hidden_size"},
    Model{"gpt-oss-20b", 32, 4, 2880, "openai/gpt-oss-20b config.json: num_local_experts, num_experts_per_tok, hidden_size"},
    Model{"GLM-4.5", 160, 8, 5120, "zai-org/GLM-4.5 config.json: n_routed_experts, num_experts_per_tok, hidden_size"},
    Model{"Llama-4-Maverick", 128, 1, 5120,
          "meta-llama/Llama-4-Maverick-17B-128E-Instruct config.json, text_config: num_local_experts, num_experts_per_tok, hidden_size"},
    Model{"MiniMax-M2", 256, 8, 3072, "MiniMaxAI/MiniMax-M2 config.json: num_local_experts, num_experts_per_tok, hidden_size"},
};

bool same_letters(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

}  // namespace

std::span<const Model> models() { return kModels; }

std::optional<Model> find_model(std::string_view name) {
  for (const Model& model : kModels) {
    if (same_letters(model.name, name)) return model;
  }
  return std::nullopt;
}

std::string model_names() {
  std::string names;
  for (const Model& model : kModels) names += (names.empty() ? "" : ", ") + std::string(model.name);
  return names;
}

}  // namespace turnout::tools
