// Messages are searched for the row's bytes: how an engine packs rows, and whether it sends one or many at once, makes no difference.
#include "tools/flip.h"

#include <algorithm>
#include <utility>

namespace turnout::tools {

namespace {

class FlipWindow final : public transport::Window {
 public:
  FlipWindow(std::unique_ptr<transport::Window> inner, std::shared_ptr<Flip> flip, int rank)
      : inner_(std::move(inner)), flip_(std::move(flip)), rank_(rank) {}
  size_t num_bytes() const override { return inner_->num_bytes(); }
  int num_signals() const override { return inner_->num_signals(); }
  std::byte* local() override { return inner_->local(); }
  std::byte* peer_ptr(int peer) override { return peer == rank_ ? inner_->peer_ptr(peer) : nullptr; }

  void put(int peer, size_t offset, const void* src, size_t num_bytes) override {
    const auto* begin = static_cast<const std::byte*>(src);
    if (peer == rank_ || !flip_->armed.load(std::memory_order_acquire) || flip_->done.load(std::memory_order_relaxed)) {
      return inner_->put(peer, offset, src, num_bytes);
    }
    const auto* found = std::search(begin, begin + num_bytes, flip_->row.begin(), flip_->row.end());
    if (found == begin + num_bytes || flip_->done.exchange(true)) return inner_->put(peer, offset, src, num_bytes);
    std::vector<std::byte> message(begin, begin + num_bytes);
    message[static_cast<size_t>(found - begin) + flip_->byte] ^= flip_->mask;
    inner_->put(peer, offset, message.data(), num_bytes);
  }

  void signal(int peer, int index, uint64_t value) override { inner_->signal(peer, index, value); }
  const std::atomic<uint64_t>* signals() const override { return inner_->signals(); }
  void progress() override { inner_->progress(); }
  uint32_t arm() override { return inner_->arm(); }
  void sleep(uint32_t ticket) override { inner_->sleep(ticket); }
  void disarm() override { inner_->disarm(); }

 private:
  std::unique_ptr<transport::Window> inner_;
  std::shared_ptr<Flip> flip_;
  const int rank_;
};

class FlipTransport final : public transport::Transport {
 public:
  FlipTransport(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Flip> flip) : inner_(std::move(inner)), flip_(std::move(flip)) {}
  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }
  std::unique_ptr<transport::Window> open(std::string_view label, size_t num_bytes, int num_signals) override {
    return std::make_unique<FlipWindow>(inner_->open(label, num_bytes, num_signals), flip_, rank());
  }
  transport::PeerState peer_state(int peer) const override { return inner_->peer_state(peer); }
  uint64_t heartbeat(int peer) const override { return inner_->heartbeat(peer); }
  std::chrono::nanoseconds spin() const override { return inner_->spin(); }

 private:
  std::shared_ptr<transport::Transport> inner_;
  std::shared_ptr<Flip> flip_;
};

}  // namespace

std::shared_ptr<transport::Transport> with_flip(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Flip> flip) {
  return std::make_shared<FlipTransport>(std::move(inner), std::move(flip));
}

}  // namespace turnout::tools
