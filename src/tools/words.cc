// The words that options use for the closed sets of the API.
#include <array>
#include <utility>

#include "tools/bench.h"
#include "turnout/error.h"

namespace turnout::tools {

namespace {

template <class Value, size_t N>
Value pick(const char* option, const std::string& text, const std::array<std::pair<const char*, Value>, N>& choices) {
  std::string known;
  for (const auto& [word, value] : choices) {
    if (text == word) return value;
    known += (known.empty() ? "" : ", ") + std::string(word);
  }
  throw InvalidArgument("--" + std::string(option) + " " + text + " is unknown: use one of " + known);
}

}  // namespace

Mode mode_from(const std::string& text) {
  return pick("mode", text,
              std::array{std::pair{"auto", Mode::automatic}, std::pair{"throughput", Mode::throughput}, std::pair{"low_latency", Mode::low_latency}});
}

Layout layout_from(const std::string& text) {
  return pick("layout", text,
              std::array{std::pair{"rank_major", Layout::rank_major}, std::pair{"expert_major", Layout::expert_major},
                         std::pair{"expert_slab", Layout::expert_slab}});
}

Wire wire_from(const std::string& text) {
  return pick(
      "wire", text,
      std::array{std::pair{"payload", Wire::payload}, std::pair{"fp32", Wire::fp32}, std::pair{"fp8", Wire::fp8}, std::pair{"rows", Wire::rows}});
}

}  // namespace turnout::tools
