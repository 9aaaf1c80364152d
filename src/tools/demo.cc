#include "tools/demo.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>

#include "api/communicator_impl.h"
#include "core/routing.h"
#include "tools/bench.h"
#include "tools/demo_tables.h"
#include "tools/environment.h"
#include "tools/flip.h"
#include "tools/gpus.h"
#include "tools/moe_layer.h"
#include "tools/place.h"
#include "tools/plan.h"
#include "tools/report.h"
#include "tools/routing_source.h"
#include "tools/self_launch.h"
#include "turnout/buffer.h"

namespace turnout::tools {

namespace {

using Clock = std::chrono::steady_clock;
size_t size(int64_t n) { return static_cast<size_t>(n); }

/// Words of a rank in one call: a long text goes through the layer in pieces, so that memory does not grow with it.
constexpr size_t kMostWords = 4096;

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
    load_.assign(experts_.experts_of(communicator.rank()).size(), 0);
    sent_.assign(ranks, 0);
  }

  int run() {
    introduce();
    if (options_.corrupt && !place_->gpu()) {
      flip_ = std::make_shared<Flip>();
      communicator_.impl()->transport = with_flip(communicator_.impl()->transport, flip_);
    }
    Buffer buffer(communicator_, config());
    const size_t pieces = (most_words_ + kMostWords - 1) / kMostWords;
    Progress progress("demo", static_cast<int64_t>(pieces), speaks() && pieces > 1);
    for (piece_ = 0; piece_ < pieces; ++piece_) {
      const auto begin = static_cast<int64_t>(std::min(words_.size(), piece_ * kMostWords));
      const auto end = static_cast<int64_t>(std::min(words_.size(), (piece_ + 1) * kMostWords));
      const std::vector<std::string> words(words_.begin() + begin, words_.begin() + end);
      if (piece_ > 0 && place_->gpu()) place_ = open_place(place_->device());  // what it held goes with it
      spread(buffer, words);
      compare(words, size(begin));
      count_traffic();
      progress.at(static_cast<int64_t>(piece_) + 1);
    }
    if (flip_) {
      const auto flipped = gather(communicator_, static_cast<int64_t>(flip_->done));
      if (std::count(flipped.begin(), flipped.end(), 1) != 1) throw TransportError("--corrupt: no message held the row that was to be changed");
    }
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
    c.max_tokens_per_rank = static_cast<int64_t>(std::min(most_words_, kMostWords));
    c.max_topk = layer_.shape().topk;
    c.receive_bytes =
        2 * words_at_once() * size(layer_.shape().topk) * (layer_.row_bytes() + 128) / static_cast<size_t>(communicator_.num_ranks()) + (1 << 20);
    c.touch_pages = true;
    c.device = place_->device();
    if (place_->gpu()) c.receive_bytes += gpu_bytes();
    return c;
  }

  /// What calls on a GPU take beside results: rows before they are laid out, and partial sums in which every expert's row may cross.
  size_t gpu_bytes() const {
    const size_t topk = size(layer_.shape().topk), row = layer_.row_bytes() + 256;
    return 2 * words_at_once() * topk * row + std::min(most_words_, kMostWords) * topk * topk * 2 * row;
  }
  /// Of all ranks.
  size_t words_at_once() const { return std::min(total_words_, kMostWords * size(communicator_.num_ranks())); }

  /// The layer over all ranks; what a user of the library writes.
  void spread(Buffer& buffer, const std::vector<std::string>& words) {
    const LayerShape& s = layer_.shape();
    const auto tokens = static_cast<int64_t>(words.size());
    const std::vector<std::byte> x = layer_.embed(words);
    layer_.route(x, idx_, weights_);

    DispatchArgs send;
    send.x = place_->put(TensorView::dense(x.data(), s.dtype, {tokens, s.hidden}));
    send.topk_idx = place_->put(TensorView::dense(idx_.data(), DType::i32, {tokens, s.topk}));
    send.topk_weights = place_->put(TensorView::dense(weights_.data(), DType::fp32, {tokens, s.topk}));
    send.layout = Layout::expert_major;
    send.mode = mode_from(options_.mode);
    send.stream = place_->stream();
    if (piece_ == 0) buffer.dispatch(send);  // once before it is timed: pages and connections are warm
    place_->finish();
    if (flip_ && piece_ == 0) choose_a_bit(x);
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
    story_.dispatch_us += us(t1 - t0), story_.experts_us += us(t2 - t1), story_.combine_us += us(t4 - t3);
  }

  /// Expert output, a row for each that was received.
  std::vector<std::byte> apply_experts(const DispatchResult& received) {
    const int64_t rows = place_->get(received.num_rows).as<int64_t>()[0];
    const TensorView x = place_->get(received.x), offsets = place_->get(received.expert_offsets), counts = place_->get(received.expert_counts);
    if (options_.corrupt && !flip_ && piece_ == 0) flip_a_bit(x, rows);
    const auto owned = experts_.experts_of(communicator_.rank());
    std::vector<std::byte> y(size(rows) * layer_.row_bytes());
    for (size_t e = 0; e < owned.size(); ++e) {
      const int64_t first = offsets.as<int64_t>()[e], count = counts.as<int32_t>()[e];
      load_[e] += count;
      for (int64_t row = first; row < first + count; ++row) layer_.apply_expert(owned[e], x.row(row), y.data() + size(row) * layer_.row_bytes());
    }
    return y;
  }

  /// The bit that makes most of a number: the highest of the exponent of a row's first element.
  size_t byte_to_flip() const { return layer_.shape().dtype == DType::bf16 ? 1 : 3; }
  static constexpr std::byte kBitToFlip{0x40};

  /// Of the first word that leaves its rank, on the first rank that has one.
  void choose_a_bit(const std::vector<std::byte>& x) {
    const size_t topk = size(layer_.shape().topk), tokens = idx_.size() / topk;
    size_t at = 0;
    const auto leaves = [&](size_t token) {
      return std::any_of(idx_.begin() + static_cast<int64_t>(token * topk), idx_.begin() + static_cast<int64_t>((token + 1) * topk),
                         [&](int32_t e) { return experts_.rank_of(e) != communicator_.rank(); });
    };
    while (at < tokens && !leaves(at)) ++at;
    const auto has_one = gather(communicator_, static_cast<int64_t>(at < tokens));
    const auto first = std::find(has_one.begin(), has_one.end(), 1) - has_one.begin();
    if (first == communicator_.num_ranks()) throw InvalidArgument("--corrupt: no word of this text leaves its rank: use a longer one");
    if (first != communicator_.rank()) return;
    const auto row = x.begin() + static_cast<int64_t>(at * layer_.row_bytes());
    flip_->row.assign(row, row + static_cast<int64_t>(layer_.row_bytes()));
    flip_->byte = byte_to_flip();
    flip_->mask = kBitToFlip;
    flip_->armed.store(true, std::memory_order_release);
  }

  /// Rows that GPUs send do not pass by here: a bit of the first row that arrived at the last rank that has rows.
  void flip_a_bit(const TensorView& x, int64_t rows) {
    const auto counts = gather(communicator_, rows);
    int victim = communicator_.num_ranks() - 1;
    while (victim > 0 && counts[size(victim)] == 0) --victim;
    if (communicator_.rank() != victim || rows == 0) return;
    x.row(0)[byte_to_flip()] ^= kBitToFlip;
  }

  /// The same layer on one rank, for words of this rank from number `first` on.
  void compare(const std::vector<std::string>& words, size_t first) {
    const std::vector<std::byte> expected = layer_.forward(words);
    const auto hidden = size(layer_.shape().hidden);
    std::vector<float> a(hidden), b(hidden);
    for (size_t t = 0; t < words.size(); ++t) {
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
      if (story_.first_wrong < 0) story_.first_wrong = static_cast<int64_t>(first + t);
    }
  }

  /// Relative to the largest element of a row: a few roundings of the wire's type.
  double tolerance() const {
    if (wire_ == Wire::fp8) return 0.1;
    return layer_.shape().dtype == DType::bf16 ? 0.02 : 1e-5;
  }

  void count_traffic() {
    const size_t topk = size(layer_.shape().topk);
    for (size_t t = 0; t < idx_.size() / topk; ++t) {
      std::vector<char> there(sent_.size());
      for (size_t k = 0; k < topk; ++k) there[size(experts_.rank_of(idx_[t * topk + k]))] = 1;
      for (size_t r = 0; r < sent_.size(); ++r) sent_[r] += there[r];
    }
  }

  int tell() {
    const auto loads = gather(communicator_, load_);
    const auto traffic = gather(communicator_, sent_);
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
      print_load(experts_, layer_.shape().topk, loads);
      print_traffic(layer_.row_bytes(), traffic);
      std::printf("\nTimes (slowest rank): dispatch %.0f us, experts %.0f us, combine %.0f us\n", all.dispatch_us, all.experts_us, all.combine_us);
      print_verdict(all);
    }
    return all.wrong_tokens == 0 ? 0 : 1;
  }

  void print_verdict(const Story& all) const {
    if (options_.corrupt) {
      std::printf("\nOne bit of a row was flipped %s (--corrupt): the comparison must fail.\n",
                  flip_ ? "on its way to another rank" : "where it arrived");
    }
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
  size_t piece_ = 0;
  std::shared_ptr<Flip> flip_;
  std::vector<int64_t> load_, sent_;
  std::vector<std::byte> result_;
  Story story_;
};

}  // namespace

int run_demo(const DemoOptions& options) {
  wire_from(options.wire);
  mode_from(options.mode);
  if (options.dtype != "bf16" && options.dtype != "fp32") throw InvalidArgument("--dtype " + options.dtype + " is unknown: use bf16 or fp32");
  const std::string path = text_to_read(options.text);
  std::error_code unreadable;  // told when it is read
  const uintmax_t bytes = std::filesystem::is_regular_file(path, unreadable) ? std::filesystem::file_size(path, unreadable) : 0;
  const LaunchInfo launched = launch_info_from_env();
  const bool alone = launched.launcher == "none";
  // What is wrong is told once, before ranks start; a launcher has started them already. Every rank holds the text and its words, and
  // the rows of a piece.
  constexpr double kProcess = 8e6, kPerWord = 16e3, kPerByte = 12, kBytesOfAWord = 4;
  if (alone && !unreadable && options.ranks >= 1 && options.ranks <= kMostRanks) {
    const double text = static_cast<double>(bytes), piece = std::min(text / kBytesOfAWord / options.ranks, static_cast<double>(kMostWords));
    check_memory(options.ranks * (kProcess + kPerWord * piece + kPerByte * text), "the demo", "a shorter --text or fewer --ranks");
  }
  if (words_of(read_text(path)).empty()) throw InvalidArgument("--text " + options.text + " holds no words");
  check_device(options.device);
  if (options.corrupt && device_from(options.device).kind == DeviceKind::cpu && (alone ? options.ranks : launched.num_ranks) < 2) {
    throw InvalidArgument("--corrupt needs --ranks 2 or more: on one rank nothing is on its way");
  }
  return run_ranks(options.ranks, placement_from(options.placement), options.command_line,
                   [&](Communicator& communicator) { return Demo(communicator, options).run(); });
}

}  // namespace turnout::tools
