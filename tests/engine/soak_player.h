// One rank's play of a session on one Buffer. The script, which all ranks draw alike, says which calls there are; each rank
// draws for itself where memory lies, how long it keeps results, and when it sleeps: none of that may matter.
#pragma once
#include <memory>
#include <optional>
#include <thread>

#include "engine/soak_session.h"

namespace turnout::testing {

class Player {
 public:
  Player(const Session& session, Buffer& buffer, std::unique_ptr<Place> place, std::vector<int> lanes, uint64_t script)
      : s_(session),
        buffer_(buffer),
        place_(std::move(place)),
        rank_(buffer.rank()),
        lanes_(std::move(lanes)),
        shared_(script),
        own_(script * 31 + static_cast<uint64_t>(rank_)) {}

  /// Throws at the first difference. Returns what was compared.
  Tally play(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      if (rank_ == s_.slow_rank && own_.chance(0.3)) std::this_thread::sleep_for(std::chrono::microseconds(own_.below(3000)));
      do_step();
    }
    while (!open_.empty()) wait_for(0);
    while (!kept_.empty()) forget(0);
    return tally_;
  }

 private:
  struct Kept {
    int family = 0, variant = 0;
    core::Bytes out;
    std::vector<TensorView> put;
    DispatchResult result;
  };
  struct Open {
    int lane = 0, family = 0, variant = 0;
    std::unique_ptr<RankArguments> arguments;
    std::unique_ptr<Handle> handle;
    core::Bytes x, out;
    std::vector<TensorView> put;  ///< memory of the place that the call uses
    std::unique_ptr<Kept> rows;   ///< whose lease holds the rows of a combine
    std::optional<PendingDispatch> dispatch;
    std::optional<PendingCombine> combine;
  };
  struct Known {
    int family;
    Handle handle;
  };
  template <class T>
  int64_t any_of(const T& list) {
    return shared_.below(static_cast<int64_t>(list.size()));
  }
  const Family& family(int at) const { return s_.families[static_cast<size_t>(at)]; }
  void count(const std::string& what) { ++tally_[what]; }
  TensorView put(Open& open, const TensorView& host) {
    const TensorView there = place_->put(host);
    if (there.defined()) open.put.push_back(there);
    return there;
  }
  void give_back(const std::vector<TensorView>& put) {
    for (const TensorView& t : put) place_->give_back(t);
  }
  /// What was issued has happened, and throws here if it failed.
  void settle() {
    if (s_.num_gpus == 0) return;
    place_->finish();
    buffer_.check();
  }

  void do_step() {
    const int lane = shared_.one_of(lanes_);
    const auto what = shared_.below(20);
    const auto on_lane = std::count_if(open_.begin(), open_.end(), [&](const Open& o) { return o.lane == lane; });
    if (on_lane == s_.config.max_outstanding || (what < 2 && !open_.empty())) {
      wait_for(static_cast<size_t>(any_of(open_)));
    } else if (what == 2 && s_.maps.size() > 1) {
      map_ = static_cast<int>(any_of(s_.maps));
      buffer_.set_expert_to_rank(s_.maps[static_cast<size_t>(map_)]);
      count("experts moved");
    } else if (what == 3) {
      be_refused(lane);
    } else if (what < 10 || known_.empty()) {
      const int at = static_cast<int>(any_of(s_.families));
      if (family(at).map == map_) start_dispatch(lane, at, 0, nullptr);
    } else {
      const Known& known = known_[static_cast<size_t>(any_of(known_))];
      const int variant = static_cast<int>(shared_.below(2));
      if (what < 14) start_dispatch(lane, known.family, variant, &known.handle);
      else start_combine(lane, known.family, variant, known.handle);
    }
    if (known_.size() > 6) known_.erase(known_.begin() + any_of(known_));
    while (kept_.size() > 3 || (!kept_.empty() && own_.chance(0.3))) forget(static_cast<size_t>(own_.below(static_cast<int64_t>(kept_.size()))));
  }

  /// A call that one rank alone gets wrong: all raise, and the lane goes on.
  void be_refused(int lane) {
    const auto who = static_cast<int>(shared_.below(s_.num_ranks));
    const int at = static_cast<int>(any_of(s_.families));
    RunChoices run;
    run.mode = shared_.one_of(kModes);
    if (family(at).map != map_) return;
    RankArguments arguments(family(at).variants[0], rank_, run);
    Open memory;
    move_to_place(memory, arguments);
    DispatchArgs args = arguments.dispatch;
    args.lane = lane;
    if (rank_ == who) args.topk_idx = args.topk_weights = TensorView();
    try {
      const DispatchResult result = buffer_.dispatch(args);
      settle();
    } catch (const InvalidArgument&) {
      count("refused");
      give_back(memory.put);
      return;
    }
    throw std::runtime_error("a call that rank " + std::to_string(who) + " refused went well on rank " + std::to_string(rank_));
  }

  void move_to_place(Open& open, RankArguments& arguments) {
    DispatchArgs& args = arguments.dispatch;
    args.x = put(open, args.x);
    args.topk_idx = put(open, args.topk_idx);
    args.topk_weights = put(open, args.topk_weights);
    for (TensorView& side : args.side) side = put(open, side);
    args.stream = place_->stream();
  }

  void start_dispatch(int lane, int at, int variant, const Handle* handle) {
    const Family& f = family(at);
    const RandomProblem& p = f.variants[variant];
    RunChoices run;
    run.mode = shared_.one_of(kModes);
    run.i32_ids = own_.chance(0.5);
    run.result = own_.chance(0.3) ? ResultKind::fresh : ResultKind::automatic;
    run.receive = own_.chance(0.3) && s_.own_threads ? Receive::resident : Receive::deferred;
    Open& open = open_.emplace_back();
    open.lane = lane;
    open.family = at;
    open.variant = variant;
    open.arguments = std::make_unique<RankArguments>(p, rank_, run);
    DispatchArgs& args = open.arguments->dispatch;
    args.lane = lane;
    if (handle) {
      open.handle = std::make_unique<Handle>(*handle);
      args.handle = open.handle.get();
      args.topk_idx = args.topk_weights = TensorView();
    }
    if (own_.chance(0.3)) spread(open, args.x);
    move_to_place(open, *open.arguments);
    if (own_.chance(0.2)) into_out(open, p.dispatch, f.received[variant][static_cast<size_t>(rank_)]);
    count("dispatch " + std::string(name(p.dispatch.layout)) + " " + std::string(name(run.mode)) + (handle ? " cached" : ""));
    if (p.dispatch.quantize != Quantize::none) count("dispatch to " + std::string(name(p.dispatch.quantize)));
    count(p.dispatch.capacity ? "dispatch with a capacity" : "dispatch exact");
    if (shared_.chance(0.5)) {
      count(run.receive == Receive::resident ? "dispatch_async resident" : "dispatch_async deferred");
      open.dispatch.emplace(buffer_.dispatch_async(args));
    } else {
      Open now = std::move(open);
      open_.pop_back();
      arrived(now, buffer_.dispatch(now.arguments->dispatch));
    }
  }

  /// The same rows with gaps between them.
  void spread(Open& open, TensorView& x) {
    const auto width = static_cast<size_t>(x.shape[1]) * size_of(x.dtype);
    const int64_t stride = x.shape[1] + own_.between(1, 9);
    open.x.resize(static_cast<size_t>(x.shape[0] * stride) * size_of(x.dtype));
    for (int64_t t = 0; t < x.shape[0]; ++t) std::memcpy(open.x.data() + static_cast<size_t>(t * stride) * size_of(x.dtype), x.row(t), width);
    x = TensorView::matrix(open.x.data(), x.dtype, x.shape[0], x.shape[1], stride);
    count("dispatch of strided rows");
  }

  void into_out(Open& open, const core::DispatchProblem& d, const core::DispatchOutput& want) {
    const DType dtype = d.quantize == Quantize::none ? d.dtype : DType::fp8_e4m3;
    open.out.resize(static_cast<size_t>(want.array_rows * d.hidden) * size_of(dtype));
    open.arguments->dispatch.out = put(open, TensorView::dense(open.out.data(), dtype, {want.array_rows, d.hidden}));
    open.arguments->dispatch.result = ResultKind::automatic;
    count("dispatch out=");
  }

  void start_combine(int lane, int at, int variant, const Handle& handle) {
    const Family& f = family(at);
    const RandomProblem& p = f.back[variant];
    Open& open = open_.emplace_back();
    open.lane = lane;
    open.family = at;
    open.variant = variant;
    open.handle = std::make_unique<Handle>(handle);
    CombineArgs args = combine_args(p, f.combine[variant], f.received[0], rank_, *open.handle);
    args.lane = lane;
    args.mode = shared_.one_of(kModes);
    args.weights = put(open, args.weights);
    args.side = put(open, args.side);
    args.stream = place_->stream();
    if (!own_.chance(0.5) || !into_lease(open, args)) args.y = put(open, args.y);
    if (own_.chance(0.3)) {
      const int64_t tokens = handle.num_tokens(), stride = p.hidden + own_.below(5);
      open.out.resize(static_cast<size_t>(tokens * stride) * size_of(p.dtype));
      args.out = put(open, TensorView::matrix(open.out.data(), p.dtype, tokens, p.hidden, stride));
      count("combine out=");
    }
    count("combine " + std::string(name(p.dispatch.layout)) + " " + std::string(name(args.mode)) + " wire " + std::string(name(p.wire)));
    if (p.apply != CombineWeights::none) {
      count(p.apply == CombineWeights::source   ? "combine weights of the source"
            : p.apply == CombineWeights::tokens ? "combine weights of tokens"
                                                : "combine weights of rows");
    }
    if (p.with_side) count("combine side=");
    if (shared_.chance(0.5)) {
      count("combine_async");
      open.combine.emplace(buffer_.combine_async(args));
    } else {
      const Open now = std::move(open);
      open_.pop_back();
      came_back(now, buffer_.combine(args));
    }
  }

  /// Writes the rows of a combine over those of a result of the same routing, if they fit there, as an expert in place does.
  bool into_lease(Open& open, CombineArgs& args) {
    const auto fits = [&](const Kept& k) {
      const TensorView& x = k.result.x;
      return k.family == open.family && k.result.is_lease && x.ndim == 2 && x.shape[0] == args.y.shape[0] && x.shape[0] > 0 &&
             static_cast<size_t>(x.strides[0]) * size_of(x.dtype) % 8 == 0 &&
             static_cast<size_t>(args.y.shape[1]) * size_of(args.y.dtype) <= static_cast<size_t>(x.strides[0]) * size_of(x.dtype);
    };
    const auto found = std::find_if(kept_.begin(), kept_.end(), fits);
    if (found == kept_.end()) return false;
    check(found->family, found->variant, found->result);
    open.rows = std::make_unique<Kept>(std::move(*found));
    kept_.erase(found);
    const TensorView& x = open.rows->result.x;
    const auto stride = static_cast<size_t>(x.strides[0]) * size_of(x.dtype);
    const auto width = static_cast<size_t>(args.y.shape[1]) * size_of(args.y.dtype);
    for (int64_t i = 0; i < x.shape[0]; ++i) place_->write(static_cast<std::byte*>(x.data) + static_cast<size_t>(i) * stride, args.y.row(i), width);
    args.y =
        TensorView::matrix(x.data, args.y.dtype, x.shape[0], args.y.shape[1], static_cast<int64_t>(stride / size_of(args.y.dtype)), place_->device());
    count("combine of rows in a lease");
    return true;
  }

  void wait_for(size_t at) {
    Open open = std::move(open_[at]);
    open_.erase(open_.begin() + static_cast<int64_t>(at));
    if (open.dispatch) arrived(open, open.dispatch->wait());
    else came_back(open, open.combine->wait());
  }

  void arrived(Open& open, DispatchResult result) {
    settle();
    check(open.family, open.variant, result);
    count(result.is_lease ? "results in a lease" : "results in other memory");
    known_.push_back({open.family, result.handle});
    kept_.push_back({open.family, open.variant, std::move(open.out), std::move(open.put), std::move(result)});
  }

  void came_back(const Open& open, const CombineResult& result) {
    const Family& f = family(open.family);
    const RandomProblem& p = f.back[open.variant];
    settle();
    expect_combine(result, f.combined[open.variant][static_cast<size_t>(rank_)], p.dtype, p.hidden, p.with_side, *place_);
    count(kCompared);
    if (open.rows) spoil(open.rows->result.x);
    give_back(open.put);
    if (open.rows) give_back(open.rows->put);
  }

  /// The rows of a combine are the user's again once it has ended.
  void spoil(const TensorView& x) const {
    if (s_.num_gpus > 0) return;
    for (int64_t i = 0; i < x.shape[0]; ++i) std::memset(const_cast<std::byte*>(x.row(i)), 0xA5, static_cast<size_t>(x.shape[1]) * size_of(x.dtype));
  }

  void check(int at, int variant, const DispatchResult& result) {
    const Family& f = family(at);
    expect_dispatch(result, f.received[variant][static_cast<size_t>(rank_)], f.variants[variant].dispatch, *place_);
    count(kCompared);
  }

  /// A result that was kept must still be what arrived.
  void forget(size_t at) {
    check(kept_[at].family, kept_[at].variant, kept_[at].result);
    give_back(kept_[at].put);
    kept_.erase(kept_.begin() + static_cast<int64_t>(at));
  }

 public:
  static constexpr const char* kCompared = "results compared";
  static constexpr Mode kModes[] = {Mode::automatic, Mode::throughput, Mode::low_latency};

 private:
  const Session& s_;
  Buffer& buffer_;
  const std::unique_ptr<Place> place_;
  const int rank_;
  const std::vector<int> lanes_;
  Random shared_, own_;  ///< the script, and what a rank may choose alone
  int map_ = 0;
  std::deque<Open> open_;
  std::vector<Kept> kept_;
  std::vector<Known> known_;
  Tally tally_;
};

}  // namespace turnout::testing
