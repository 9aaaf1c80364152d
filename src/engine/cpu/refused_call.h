// A call that this rank rejects: it tells everybody so, consumes its epoch, and moves nothing. It waits for no header, but for
// the end of an earlier failed call of its copy: else that one could not end before this rank comes back to the lane.
#pragma once
#include "engine/cpu/call.h"

namespace turnout::engine {

class RefusedCall final : public Call {
 public:
  /// `before`: the call that used the copy last, if it is still closing.
  RefusedCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const CallFacts& facts, const Reason& why,
              std::shared_ptr<const Call> before)
      : Call(context, lane, epoch, first_epoch, KnownFacts::of(facts), facts.handle), why_(why), before_(std::move(before)) {
    refuse(why_);
  }
  bool progress() override {
    if (finished_) return false;
    const bool moved = exchange_headers();
    if (all_headers_sent() && !(before_ && before_->closing())) {
      finished_ = true;
      stop();
    }
    return moved || finished_;
  }
  bool sent() const override { return finished_; }
  bool done() const override { return finished_; }
  Waiting waiting() const override {
    Waiting w;
    w.phase = "consumed";
    w.for_arrival = true;  // of the peers at this call, which end earlier ones on their way
    for (int peer = 0; peer < context_->num_ranks; ++peer) {
      if (peer != context_->rank && !(header_sent(peer) && (!before_ || before_->closed(peer)))) w.peers.push_back(peer);
    }
    return w;
  }
  void give_up() noexcept override { finished_ = true; }

 private:
  const Reason why_;
  std::shared_ptr<const Call> before_;
  bool finished_ = false;
};

}  // namespace turnout::engine
