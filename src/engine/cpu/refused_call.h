// A call that this rank rejects: it tells everybody so, consumes its epoch, and moves nothing.
#pragma once
#include "engine/cpu/call.h"

namespace turnout::engine {

class RefusedCall final : public Call {
 public:
  RefusedCall(const std::shared_ptr<Context>& context, int lane, uint64_t epoch, uint64_t first_epoch, const CallFacts& facts)
      : Call(context, lane, epoch, first_epoch, facts) {
    refuse();
  }
  bool progress() override {
    if (finished_) return false;
    const bool moved = exchange_headers();
    if (all_headers_sent()) give_up();
    return moved || finished_;
  }
  bool sent() const override { return finished_; }
  bool done() const override { return finished_; }
  Waiting waiting() const override {
    Waiting w;
    w.phase = "consumed";
    for (int peer = 0; peer < context_->num_ranks; ++peer) {
      if (peer != context_->rank && !header_sent(peer)) w.peers.push_back(peer);
    }
    return w;
  }
  void give_up() noexcept override {
    if (finished_) return;
    finished_ = true;
    try {
      consume_all();
    } catch (...) {
      // The peers are gone; there is nobody to tell.
    }
  }

 private:
  bool finished_ = false;
};

}  // namespace turnout::engine
