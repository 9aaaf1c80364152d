// Shapes of the MoE layers of published models: `--model NAME`.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace turnout::tools {

struct Model {
  std::string_view name;
  int num_experts;  ///< routed experts; shared ones are not routed and not counted
  int topk;
  int64_t hidden;
  std::string_view source;  ///< where the numbers are written, and under which keys
};

std::span<const Model> models();

/// Upper and lower case are one. Nothing if there is no such model.
std::optional<Model> find_model(std::string_view name);

/// "deepseek-v3, ...": for messages and help.
std::string model_names();

}  // namespace turnout::tools
