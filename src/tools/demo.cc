#include "tools/demo.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>

#include "core/routing.h"
#include "tools/bench.h"
#include "tools/environment.h"
#include "tools/gpus.h"
#include "tools/moe_layer.h"
#include "tools/place.h"
#include "tools/routing_source.h"
#include "tools/self_launch.h"
#include "turnout/buffer.h"

namespace turnout::tools {

namespace {

using Clock = std::chrono::steady_clock;
size_t size(int64_t n) { return static_cast<size_t>(n); }

std::string text_to_read(const std::string& wanted) {
  if (!wanted.empty()) return wanted;
  for (const char* path : {"/usr/share/common-licenses/GPL-3", "README.md"}) {
    if (std::filesystem::exists(path)) return path;
  }
  throw InvalidArgument("demo: no text found; give one with --text FILE");
}

/// What a rank tells rank 0.
struct Story {
  double dispatch_us = 0, experts_us = 0, combine_us = 0;
  int64_t wrong_tokens = 0, first_wrong = -1;
  double max_error = 0;
};

/// All ranks' values of a trivially copyable type, on every rank.
template <class T>
std::vector<T> gather(Communicator& communicator, const T& mine) {
  std::vector<T> all;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(&mine, 1)))) {
    all.emplace_back();
    std::memcpy(&all.back(), bytes.data(), sizeof(T));
  }
  return all;
}

std::vector<std::vector<int64_t>> gather(Communicator& communicator, const std::vector<int64_t>& mine) {
  std::vector<std::vector<int64_t>> all;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(mine)))) {
    all.emplace_back(bytes.size() / sizeof(int64_t));
    std::memcpy(all.back().data(), bytes.data(), bytes.size());
  }
  return all;
}

class Demo {
 public:
  Demo(Communicator& communicator, const DemoOptions& options)
      : communicator_(communicator),
        options_(options),
        wire_(wire_from(options.wire)),
        layer_([&] {
          LayerShape shape;
          if (options.dtype == "fp32") shape.dtype = DType::fp32;
          return shape;
        }()),
        experts_(core::ExpertMap::split(layer_.shape().num_experts, communicator.num_ranks())),
        place_(open_place(device_of(device_from(options.device), communicator))),
        gpus_(gather_gpus(communicator, place_->device())) {
    const std::vector<std::string> all = words_of(read_text(text_to_read(options.text)));
    const auto ranks = static_cast<size_t>(communicator.num_ranks()), me = static_cast<size_t>(communicator.rank());
    total_words_ = all.size();
    most_words_ = (all.size() + ranks - 1) / ranks;
    const size_t begin = std::min(all.size(), me * most_words_), end = std::min(all.size(), begin + most_words_);
    words_.assign(all.begin() + static_cast<int64_t>(begin), all.begin() + static_cast<int64_t>(end));
  }

  int run() {
    introduce();
    spread();
    compare();
    return tell();
  }

 private:
  bool speaks() const { return communicator_.rank() == 0; }

  void introduce() const {
    if (!speaks()) return;
    const LayerShape& s = layer_.shape();
    std::printf("Turnout demo: %zu words of %s\n", total_words_, text_to_read(options_.text).c_str());
    std::printf("%d ranks (%.*s), %d experts, top-%d, hidden %ld, %s, wire %s\n", communicator_.num_ranks(),
                static_cast<int>(communicator_.transport().size()), communicator_.transport().data(), s.num_experts, s.topk,
                static_cast<long>(s.hidden), options_.dtype.c_str(), options_.wire.c_str());
    if (gpus_.words.empty()) return;
    std::printf("Dispatch and combine run on %s; the experts compute on the CPU, on rows copied from there and back\n", gpus_.summary().c_str());
  }

  BufferConfig config() const {
    BufferConfig c;
    apply_environment(c);
    c.num_experts = layer_.shape().num_experts;
    c.hidden = layer_.shape().hidden;
    c.dtype = layer_.shape().dtype;
    c.max_tokens_per_rank = static_cast<int64_t>(most_words_);
    c.max_topk = layer_.shape().topk;
    c.receive_bytes =
        2 * total_words_ * size(layer_.shape().topk) * (layer_.row_bytes() + 128) / static_cast<size_t>(communicator_.num_ranks()) + (1 << 20);
    c.touch_pages = true;
    c.device = place_->device();
    if (place_->gpu()) c.receive_bytes += gpu_bytes();
    return c;
  }

  /// What calls on a GPU take beside results: rows before they are laid out, and partial sums in which every expert's row may cross.
  size_t gpu_bytes() const {
    const size_t topk = size(layer_.shape().topk), row = layer_.row_bytes() + 256;
    return 2 * total_words_ * topk * row + most_words_ * topk * topk * 2 * row;
  }

  /// The layer over all ranks; what a user of the library writes.
  void spread() {
    const LayerShape& s = layer_.shape();
    const auto tokens = static_cast<int64_t>(words_.size());
    const std::vector<std::byte> x = layer_.embed(words_);
    layer_.route(x, idx_, weights_);

    Buffer buffer(communicator_, config());
    DispatchArgs send;
    send.x = place_->put(TensorView::dense(x.data(), s.dtype, {tokens, s.hidden}));
    send.topk_idx = place_->put(TensorView::dense(idx_.data(), DType::i32, {tokens, s.topk}));
    send.topk_weights = place_->put(TensorView::dense(weights_.data(), DType::fp32, {tokens, s.topk}));
    send.layout = Layout::expert_major;
    send.mode = mode_from(options_.mode);
    send.stream = place_->stream();
    buffer.dispatch(send);  // once before it is timed: pages and connections are warm
    place_->finish();
    communicator_.barrier();
    const auto t0 = Clock::now();
    DispatchResult received = buffer.dispatch(send);
    place_->finish();
    const auto t1 = Clock::now();
    buffer.check();
    const std::vector<std::byte> y = apply_experts(received);
    const auto t2 = Clock::now();
    communicator_.barrier();

    CombineArgs back;
    back.y = place_->put(TensorView::dense(y.data(), s.dtype, {static_cast<int64_t>(y.size() / layer_.row_bytes()), s.hidden}));
    back.handle = &received.handle;
    back.apply = CombineWeights::source;
    back.wire = wire_;
    back.mode = send.mode;
    back.stream = place_->stream();
    const auto t3 = Clock::now();
    const CombineResult combined = buffer.combine(back);
    place_->finish();
    const auto t4 = Clock::now();
    buffer.check();
    const TensorView sums = place_->get(combined.x);
    result_.resize(x.size());
    for (int64_t t = 0; t < tokens; ++t) std::memcpy(result_.data() + size(t) * layer_.row_bytes(), sums.row(t), layer_.row_bytes());
    const auto us = [](auto d) { return std::chrono::duration<double, std::micro>(d).count(); };
    story_.dispatch_us = us(t1 - t0), story_.experts_us = us(t2 - t1), story_.combine_us = us(t4 - t3);
  }

  /// Expert output, a row for each that was received.
  std::vector<std::byte> apply_experts(const DispatchResult& received) {
    const int64_t rows = place_->get(received.num_rows).as<int64_t>()[0];
    const TensorView x = place_->get(received.x), offsets = place_->get(received.expert_offsets), counts = place_->get(received.expert_counts);
    if (options_.corrupt) flip_a_bit(x, rows);
    const auto owned = experts_.experts_of(communicator_.rank());
    std::vector<std::byte> y(size(rows) * layer_.row_bytes());
    load_.assign(owned.size(), 0);
    for (size_t e = 0; e < owned.size(); ++e) {
      load_[e] = counts.as<int32_t>()[e];
      const int64_t first = offsets.as<int64_t>()[e];
      for (int64_t row = first; row < first + load_[e]; ++row) layer_.apply_expert(owned[e], x.row(row), y.data() + size(row) * layer_.row_bytes());
    }
    return y;
  }

  /// As if a link had flipped it: the lowest exponent bit of the first element of the first row, on the last rank that has rows.
  void flip_a_bit(const TensorView& x, int64_t rows) {
    const auto counts = gather(communicator_, rows);
    int victim = communicator_.num_ranks() - 1;
    while (victim > 0 && counts[size(victim)] == 0) --victim;
    if (communicator_.rank() != victim || rows == 0) return;
    std::byte* row = x.row(0);
    if (layer_.shape().dtype == DType::bf16) row[0] ^= std::byte{0x80};
    else row[2] ^= std::byte{0x80};
    if (wire_ != Wire::rows) row[layer_.shape().dtype == DType::bf16 ? 1 : 3] ^= std::byte{0x40};  // a tolerance must be exceeded too
  }

  /// The same layer on one rank, for this rank's words.
  void compare() {
    const std::vector<std::byte> expected = layer_.forward(words_);
    const auto hidden = size(layer_.shape().hidden);
    std::vector<float> a(hidden), b(hidden);
    for (size_t t = 0; t < words_.size(); ++t) {
      const size_t at = t * layer_.row_bytes();
      bool wrong = std::memcmp(result_.data() + at, expected.data() + at, layer_.row_bytes()) != 0;
      if (wrong) {
        widen_row(result_.data() + at, layer_.shape().dtype, layer_.shape().hidden, a.data());
        widen_row(expected.data() + at, layer_.shape().dtype, layer_.shape().hidden, b.data());
        double error = 0, largest = 0;
        for (size_t h = 0; h < hidden; ++h) {
          const double difference = std::abs(static_cast<double>(a[h]) - static_cast<double>(b[h]));
          error = std::isfinite(difference) ? std::max(error, difference) : INFINITY;
          largest = std::max(largest, std::abs(static_cast<double>(b[h])));
        }
        story_.max_error = std::max(story_.max_error, error / std::max(largest, 1e-6));
        wrong = wire_ == Wire::rows || error > tolerance() * largest;
      }
      if (!wrong) continue;
      ++story_.wrong_tokens;
      if (story_.first_wrong < 0) story_.first_wrong = static_cast<int64_t>(t);
    }
  }

  /// Relative to the largest element of a row: a few roundings of the wire's type.
  double tolerance() const {
    if (wire_ == Wire::fp8) return 0.1;
    return layer_.shape().dtype == DType::bf16 ? 0.02 : 1e-5;
  }

  int tell() {
    const auto loads = gather(communicator_, load_);
    std::vector<int64_t> sent(size(communicator_.num_ranks()));
    for (size_t t = 0; t < words_.size(); ++t) {
      std::vector<char> there(sent.size());
      for (int k = 0; k < layer_.shape().topk; ++k) there[size(experts_.rank_of(idx_[t * size(layer_.shape().topk) + size(k)]))] = 1;
      for (size_t r = 0; r < sent.size(); ++r) sent[r] += there[r];
    }
    const auto traffic = gather(communicator_, sent);
    const auto stories = gather(communicator_, story_);
    Story all;
    for (const Story& s : stories) {
      all.dispatch_us = std::max(all.dispatch_us, s.dispatch_us);
      all.experts_us = std::max(all.experts_us, s.experts_us);
      all.combine_us = std::max(all.combine_us, s.combine_us);
      all.max_error = std::max(all.max_error, s.max_error);
      all.wrong_tokens += s.wrong_tokens;
    }
    if (speaks()) {
      print_load(loads);
      print_traffic(traffic);
      std::printf("\nTimes (slowest rank): dispatch %.0f us, experts %.0f us, combine %.0f us\n", all.dispatch_us, all.experts_us, all.combine_us);
      print_verdict(all);
    }
    return all.wrong_tokens == 0 ? 0 : 1;
  }

  void print_load(const std::vector<std::vector<int64_t>>& loads) const {
    int64_t most = 1, total = 0;
    for (const auto& rank : loads) {
      for (const int64_t n : rank) most = std::max(most, n), total += n;
    }
    std::printf("\nLoad: rows per expert (a word goes to %d; even would be %ld)\n", layer_.shape().topk,
                static_cast<long>(total / layer_.shape().num_experts));
    for (size_t r = 0; r < loads.size(); ++r) {
      for (size_t e = 0; e < loads[r].size(); ++e) {
        const auto bar = static_cast<size_t>(loads[r][e] * 60 / most);
        std::printf("  rank %2zu expert %2d %7ld %s\n", r, experts_.experts_of(static_cast<int>(r))[e], static_cast<long>(loads[r][e]),
                    std::string(bar, '#').c_str());
      }
    }
  }

  void print_traffic(const std::vector<std::vector<int64_t>>& traffic) const {
    constexpr size_t kMostColumns = 8;
    const size_t columns = std::min(traffic.size(), kMostColumns);
    std::printf("\nTraffic: words sent from a rank (line) to a rank (column), each once%s\n  from \\ to",
                columns < traffic.size() ? ", first ranks only" : "");
    for (size_t to = 0; to < columns; ++to) std::printf(" %8zu", to);
    std::printf("\n");
    int64_t remote = 0, total = 0;
    for (size_t from = 0; from < traffic.size(); ++from) {
      if (from < columns) std::printf("  %9zu", from);
      for (size_t to = 0; to < traffic[from].size(); ++to) {
        if (from < columns && to < columns) std::printf(" %8ld", static_cast<long>(traffic[from][to]));
        total += traffic[from][to];
        if (from != to) remote += traffic[from][to];
      }
      if (from < columns) std::printf("\n");
    }
    const double mega = static_cast<double>(layer_.row_bytes()) / 1e6;
    std::printf("  %ld rows (%.2f MB) moved, %ld of them (%.2f MB) between ranks\n", static_cast<long>(total), static_cast<double>(total) * mega,
                static_cast<long>(remote), static_cast<double>(remote) * mega);
  }

  void print_verdict(const Story& all) const {
    if (options_.corrupt) std::printf("\nOne bit of a row was flipped on its way (--corrupt): the comparison must fail.\n");
    if (all.wrong_tokens == 0 && wire_ == Wire::rows) {
      std::printf("\nPASS: all %zu outputs equal those of the layer on one rank, bit for bit\n", total_words_);
    } else if (all.wrong_tokens == 0) {
      std::printf("\nPASS: all %zu outputs are those of the layer on one rank (largest relative error %.2g, allowed %.2g)\n", total_words_,
                  all.max_error, tolerance());
    } else {
      std::printf("\nFAIL: %ld of %zu outputs differ from the layer on one rank (largest relative error %.2g)\n", static_cast<long>(all.wrong_tokens),
                  total_words_, all.max_error);
    }
  }

  Communicator& communicator_;
  const DemoOptions& options_;
  Wire wire_;
  MoeLayer layer_;
  core::ExpertMap experts_;
  std::unique_ptr<Place> place_;
  Gpus gpus_;
  std::vector<std::string> words_;
  size_t total_words_ = 0, most_words_ = 0;
  std::vector<int32_t> idx_;
  std::vector<float> weights_;
  std::vector<int64_t> load_;
  std::vector<std::byte> result_;
  Story story_;
};

}  // namespace

int run_demo(const DemoOptions& options) {
  wire_from(options.wire);
  mode_from(options.mode);
  if (options.dtype != "bf16" && options.dtype != "fp32") throw InvalidArgument("--dtype " + options.dtype + " is unknown: use bf16 or fp32");
  if (words_of(read_text(text_to_read(options.text))).empty()) throw InvalidArgument("--text " + options.text + " holds no words");
  check_device(options.device);
  return run_ranks(options.ranks, placement_from(options.placement), options.arguments,
                   [&](Communicator& communicator) { return Demo(communicator, options).run(); });
}

}  // namespace turnout::tools
