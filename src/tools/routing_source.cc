#include "tools/routing_source.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <numeric>

#include "tools/file.h"
#include "tools/npy.h"
#include "turnout/error.h"

namespace turnout::tools {

// splitmix64: one addition and three multiplications per number.
uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

uint64_t hash_text(std::string_view text) {
  uint64_t h = 14695981039346656037ull;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return h;
}

std::string read_text(const std::string& path) { return read_file(path, "text"); }

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (std::isalnum(u) || u > 127) {
      word += static_cast<char>(std::tolower(u));
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

namespace {

/// Draws distinct experts by weight: repeated draws by bisection of the running sum, taken ones drawn again; when that becomes
/// long (few experts hold all weight), the lowest id left.
class Sampler {
 public:
  explicit Sampler(std::vector<double> weights) : sums_(std::move(weights)) { std::partial_sum(sums_.begin(), sums_.end(), sums_.begin()); }

  /// Fills `out` from `begin` on; what is before it is already taken.
  void draw(Random& random, std::vector<int64_t>& out, size_t begin) const {
    for (size_t k = begin; k < out.size(); ++k) {
      if (k >= sums_.size()) continue;  // stays -1
      int64_t expert = -1;
      for (int tries = 0; tries < 64 && (expert < 0 || taken(out, k, expert)); ++tries) expert = once(random);
      for (int64_t e = 0; taken(out, k, expert); ++e) expert = e;
      out[k] = expert;
    }
  }

 private:
  static bool taken(const std::vector<int64_t>& out, size_t k, int64_t expert) {
    return std::find(out.begin(), out.begin() + static_cast<int64_t>(k), expert) != out.begin() + static_cast<int64_t>(k);
  }
  int64_t once(Random& random) const {
    const auto at = std::upper_bound(sums_.begin(), sums_.end(), random.real() * sums_.back());
    return std::min<int64_t>(at - sums_.begin(), static_cast<int64_t>(sums_.size()) - 1);
  }
  std::vector<double> sums_;
};

double zipf_exponent(const RoutingOptions& o) {
  const std::string text = o.source.substr(5);
  double s = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), s);
  if (error != std::errc() || end != text.data() + text.size() || !(s >= 0 && s <= 100)) {
    throw InvalidArgument("--routing " + o.source + ": expected zipf:S with S from 0 to 100, for example zipf:1.2");
  }
  return s;
}

std::vector<double> zipf_weights(const RoutingOptions& o) {
  const double s = zipf_exponent(o);
  std::vector<size_t> place(static_cast<size_t>(o.num_experts));
  std::iota(place.begin(), place.end(), size_t{0});
  Random random(o.seed ^ 0x7a697066);
  for (size_t i = place.size(); i > 1; --i) std::swap(place[i - 1], place[random.below(i)]);
  std::vector<double> weights(place.size());
  for (size_t e = 0; e < place.size(); ++e) weights[e] = std::pow(static_cast<double>(place[e] + 1), -s);
  return weights;
}

void fill_drawn(const RoutingOptions& o, int rank, RoutingTable& table) {
  const bool one = o.source == "one-expert";
  const Sampler sampler(o.source.starts_with("zipf:") ? zipf_weights(o) : std::vector<double>(static_cast<size_t>(o.num_experts), 1.0));
  Random random(o.seed * 0x100000001b3ull + static_cast<uint64_t>(rank));
  std::vector<int64_t> chosen(static_cast<size_t>(o.topk));
  for (int64_t t = 0; t < o.num_tokens; ++t) {
    std::fill(chosen.begin(), chosen.end(), -1);
    if (one) chosen[0] = 0;
    sampler.draw(random, chosen, one ? 1 : 0);
    std::copy(chosen.begin(), chosen.end(), table.topk_idx.begin() + t * o.topk);
  }
}

std::vector<std::string> read_words(const RoutingOptions& o) {
  const std::string path = o.source.substr(5);
  std::vector<std::string> words = words_of(read_text(path));
  if (words.empty()) throw InvalidArgument("--routing " + o.source + ": " + path + " holds no words");
  return words;
}

void fill_text(const RoutingOptions& o, int rank, RoutingTable& table) {
  const std::vector<std::string> words = read_words(o);
  const Sampler sampler(std::vector<double>(static_cast<size_t>(o.num_experts), 1.0));
  std::vector<int64_t> chosen(static_cast<size_t>(o.topk));
  for (int64_t t = 0; t < o.num_tokens; ++t) {
    const auto at = static_cast<size_t>(rank * o.num_tokens + t) % words.size();
    Random random(hash_text(words[at]) ^ o.seed);
    std::fill(chosen.begin(), chosen.end(), -1);
    sampler.draw(random, chosen, 0);
    std::copy(chosen.begin(), chosen.end(), table.topk_idx.begin() + t * o.topk);
  }
}

/// The table of the file, every id checked, so that all ranks refuse it or none.
IntMatrix read_routing(const RoutingOptions& o) {
  IntMatrix m = read_npy(o.source);
  if (m.cols != o.topk) {
    throw InvalidArgument("--routing " + o.source + " has " + std::to_string(m.cols) + " columns but top-k is " + std::to_string(o.topk) +
                          ": give --top-k " + std::to_string(m.cols));
  }
  if (m.rows == 0 && o.num_tokens > 0) throw InvalidArgument("--routing " + o.source + " has no rows");
  for (size_t i = 0; i < m.values.size(); ++i) {
    if (m.values[i] >= -1 && m.values[i] < o.num_experts) continue;
    throw InvalidArgument("--routing " + o.source + ": row " + std::to_string(i / static_cast<size_t>(m.cols)) + " names expert " +
                          std::to_string(m.values[i]) + ", but experts are 0 to " + std::to_string(o.num_experts - 1) + " and -1 for none");
  }
  return m;
}

void fill_npy(const RoutingOptions& o, int rank, RoutingTable& table) {
  const IntMatrix m = read_routing(o);
  for (int64_t t = 0; t < o.num_tokens; ++t) {
    const int64_t row = (rank * o.num_tokens + t) % m.rows;
    std::copy_n(m.values.begin() + row * m.cols, m.cols, table.topk_idx.begin() + t * m.cols);
  }
}

/// Random positive weights that sum to 1 per token.
void fill_weights(const RoutingOptions& o, int rank, RoutingTable& table) {
  Random random(o.seed * 31 + static_cast<uint64_t>(rank) + 0x776569ull);
  for (int64_t t = 0; t < o.num_tokens; ++t) {
    float* weights = table.topk_weights.data() + t * o.topk;
    float sum = 0;
    for (int k = 0; k < o.topk; ++k) {
      weights[k] = table.topk_idx[static_cast<size_t>(t * o.topk + k)] < 0 ? 0.0f : static_cast<float>(0.1 + random.real());
      sum += weights[k];
    }
    for (int k = 0; k < o.topk && sum > 0; ++k) weights[k] /= sum;
  }
}

}  // namespace

void check_routing(const RoutingOptions& o) {
  if (o.source == "uniform" || o.source == "one-expert") return;
  if (o.source.starts_with("zipf:")) zipf_exponent(o);
  else if (o.source.starts_with("text:")) read_words(o);
  else if (o.source.ends_with(".npy")) read_routing(o);
  else throw InvalidArgument("--routing " + o.source + " is unknown: use uniform, zipf:S, one-expert, text:FILE or FILE.npy");
}

RoutingTable make_routing(const RoutingOptions& o, int rank) {
  RoutingTable table;
  const auto size = static_cast<size_t>(o.num_tokens * o.topk);
  table.topk_idx.assign(size, -1);
  table.topk_weights.assign(size, 0.0f);
  if (o.source == "uniform" || o.source == "one-expert" || o.source.starts_with("zipf:")) {
    fill_drawn(o, rank, table);
  } else if (o.source.starts_with("text:")) {
    fill_text(o, rank, table);
  } else if (o.source.ends_with(".npy")) {
    fill_npy(o, rank, table);
  } else {
    check_routing(o);
  }
  fill_weights(o, rank, table);
  return table;
}

}  // namespace turnout::tools
