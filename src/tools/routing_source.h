// Where benchmarks and the demo get their routing from: --routing uniform | zipf:S | one-expert | text:FILE | FILE.npy.
// The same options give the same routing on every machine and run.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace turnout::tools {

/// A small generator with the same sequence everywhere (std distributions differ between libraries).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  /// In [0, 1).
  double real() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// In [0, n). REQUIRES: 0 < n < 2^53.
  uint64_t below(uint64_t n) { return static_cast<uint64_t>(real() * static_cast<double>(n)); }

 private:
  uint64_t state_;
};

/// A hash that is the same everywhere.
uint64_t hash_text(std::string_view text);

struct RoutingOptions {
  std::string source = "uniform";
  int num_experts = 1;
  int topk = 1;
  int64_t num_tokens = 0;  ///< per rank
  uint64_t seed = 1;
};

struct RoutingTable {
  std::vector<int64_t> topk_idx;    ///< [T, K]; -1 where a token has fewer experts
  std::vector<float> topk_weights;  ///< [T, K], a token's sum to 1; 0 where there is none
};

/// The tokens of `rank`. A token's experts are distinct (a .npy file says its own); with more top-k than experts the rest is -1.
///   uniform     every set of experts equally likely
///   zipf:S      expert chosen with probability ~ 1 / (1 + its place)^S; which expert has which place depends on the seed
///   one-expert  first choice always expert 0, the others uniform
///   text:FILE   a word goes where its hash says, words in the order of the file, continued at its start
///   FILE.npy    rows rank * T to (rank + 1) * T, continued at its start
/// Throws: InvalidArgument (an unknown source, a file that cannot be read, ids that are no experts).
RoutingTable make_routing(const RoutingOptions& options, int rank);

/// Whether make_routing() will do for every rank, without making it. Throws: InvalidArgument as make_routing().
void check_routing(const RoutingOptions& options);

/// Words of a text: runs of letters, digits and bytes above 127, in lower case.
std::vector<std::string> words_of(const std::string& text);

/// Throws: InvalidArgument.
std::string read_text(const std::string& path);

}  // namespace turnout::tools
