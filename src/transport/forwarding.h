// A transport in front of another that does as that one does: what changes something on the way derives from these and says only what.
#pragma once
#include <memory>
#include <string_view>
#include <utility>

#include "transport/transport.h"

namespace turnout::transport {

class ForwardingWindow : public Window {
 public:
  ForwardingWindow(std::unique_ptr<Window> inner, int rank) : inner_(std::move(inner)), rank_(rank) {}
  size_t num_bytes() const override { return inner_->num_bytes(); }
  int num_signals() const override { return inner_->num_signals(); }
  std::byte* local() override { return inner_->local(); }
  std::byte* peer_ptr(int peer) override { return inner_->peer_ptr(peer); }
  void put(int peer, size_t offset, const void* src, size_t num_bytes) override { inner_->put(peer, offset, src, num_bytes); }
  void signal(int peer, int index, uint64_t value) override { inner_->signal(peer, index, value); }
  const std::atomic<uint64_t>* signals() const override { return inner_->signals(); }
  void progress() override { inner_->progress(); }
  uint32_t arm() override { return inner_->arm(); }
  void sleep(uint32_t ticket) override { inner_->sleep(ticket); }
  void disarm() override { inner_->disarm(); }

 protected:
  const std::unique_ptr<Window> inner_;
  const int rank_;  ///< of whom the window is
};

/// Derived classes open windows.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  int rank() const override { return inner_->rank(); }
  int num_ranks() const override { return inner_->num_ranks(); }
  PeerState peer_state(int peer) const override { return inner_->peer_state(peer); }
  uint64_t heartbeat(int peer) const override { return inner_->heartbeat(peer); }
  std::chrono::nanoseconds spin() const override { return inner_->spin(); }

 protected:
  const std::shared_ptr<Transport> inner_;
};

}  // namespace turnout::transport
