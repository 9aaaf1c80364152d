// Configurations that ranks tell each other: whatever bytes come, they are the same as ours or refused in words.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "api/agreement.h"
#include "turnout/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnout;
  const std::vector<int> split = {0, 0, 1}, own = {0, 1, 2}, mixed = {1, 0, 1};
  const bool mapped = size > 0 && data[0] % 2 == 1;
  const api::ConfigurationFacts facts = {
      {"num_experts", "3"}, {"expert_to_rank", api::text_of_map(mapped ? mixed : split, split)}, {"replica_of", api::text_of_map(own, own)}};
  std::string mine;
  for (const auto& [name, value] : facts) mine += value + "\n";
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const auto* text = reinterpret_cast<const std::byte*>(mine.data());
  const std::vector<std::byte> theirs(bytes + (size > 0 ? 1 : 0), bytes + size);
  const std::vector<std::vector<std::byte>> all = {{text, text + mine.size()}, theirs, {text, text + mine.size()}};
  try {
    api::compare_configurations(facts, all, split, own);
    // What is behind the facts is another version's: that the facts differ would have been told.
    if (theirs.size() < mine.size() || !std::equal(all[0].begin(), all[0].end(), theirs.begin())) std::abort();
  } catch (const InvalidArgument& e) {
    if (std::string(e.what()).size() < 20) std::abort();
  }
  return 0;
}
