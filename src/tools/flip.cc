// Messages are searched for the row's bytes: how an engine packs rows, and whether it sends one or many at once, makes no difference.
#include "tools/flip.h"

#include <algorithm>
#include <utility>

#include "transport/forwarding.h"

namespace turnout::tools {

namespace {

class FlipWindow final : public transport::ForwardingWindow {
 public:
  FlipWindow(std::unique_ptr<transport::Window> inner, std::shared_ptr<Flip> flip, int rank)
      : ForwardingWindow(std::move(inner), rank), flip_(std::move(flip)) {}
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

 private:
  std::shared_ptr<Flip> flip_;
};

class FlipTransport final : public transport::ForwardingTransport {
 public:
  FlipTransport(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Flip> flip)
      : ForwardingTransport(std::move(inner)), flip_(std::move(flip)) {}
  std::unique_ptr<transport::Window> open(std::string_view label, size_t num_bytes, int num_signals) override {
    return std::make_unique<FlipWindow>(inner_->open(label, num_bytes, num_signals), flip_, rank());
  }

 private:
  std::shared_ptr<Flip> flip_;
};

}  // namespace

std::shared_ptr<transport::Transport> with_flip(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Flip> flip) {
  return std::make_shared<FlipTransport>(std::move(inner), std::move(flip));
}

}  // namespace turnout::tools
