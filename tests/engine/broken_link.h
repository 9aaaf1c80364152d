// A transport in front of another that does one thing wrong: a bit flips on its way or in memory, a message is lost, a signal has
// another value. What it does, and when, the test says.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "transport/forwarding.h"

namespace turnout::testing {

/// Shared by all ranks. Operations of `source` to other ranks are counted: puts, and signals.
struct Fault {
  enum class Kind { none, bit_in_put, lost_put, bit_of_signal, bit_in_memory };
  Kind kind = Kind::none;
  int source = 0;
  int64_t at = 0;     ///< which operation of the source
  uint64_t bit = 0;   ///< of the message or signal, modulo its size
  bool puts = false;  ///< ranks do not reach each other's memory by load and store: all goes through put()
  /// bit_in_memory: looks at a signal of `source` just before it is raised, and changes the arena of whom it likes. True once it has.
  std::function<bool(transport::Window& window, int peer, int signal)> change{};

  std::atomic<int64_t> num_puts{0}, num_signals{0};
  std::atomic<bool> done{false};
};

class BrokenWindow final : public transport::ForwardingWindow {
 public:
  BrokenWindow(std::unique_ptr<transport::Window> inner, std::shared_ptr<Fault> fault, int rank)
      : ForwardingWindow(std::move(inner), rank), fault_(std::move(fault)) {}
  std::byte* peer_ptr(int peer) override { return peer == rank_ || !fault_->puts ? inner_->peer_ptr(peer) : nullptr; }

  void put(int peer, size_t offset, const void* src, size_t num_bytes) override {
    const bool lost = fault_->kind == Fault::Kind::lost_put;
    if (!(lost || fault_->kind == Fault::Kind::bit_in_put) || !is_it(peer, fault_->num_puts) || num_bytes == 0) {
      if (fault_->kind == Fault::Kind::none && rank_ == fault_->source && peer != rank_) ++fault_->num_puts;
      return inner_->put(peer, offset, src, num_bytes);
    }
    fault_->done = true;
    if (lost) return;
    const auto* bytes = static_cast<const std::byte*>(src);
    std::vector<std::byte> message(bytes, bytes + num_bytes);
    message[fault_->bit / 8 % num_bytes] ^= std::byte{1} << fault_->bit % 8;
    inner_->put(peer, offset, message.data(), num_bytes);
  }
  void signal(int peer, int index, uint64_t value) override {
    if (fault_->kind == Fault::Kind::bit_of_signal && is_it(peer, fault_->num_signals)) {
      fault_->done = true;
      value ^= uint64_t{1} << fault_->bit % 64;
    } else if (fault_->kind == Fault::Kind::bit_in_memory && rank_ == fault_->source && !fault_->done && fault_->change(*inner_, peer, index)) {
      fault_->done = true;
    } else if (fault_->kind == Fault::Kind::none && rank_ == fault_->source && peer != rank_) {
      ++fault_->num_signals;
    }
    inner_->signal(peer, index, value);
  }

 private:
  bool is_it(int peer, std::atomic<int64_t>& count) const { return rank_ == fault_->source && peer != rank_ && count++ == fault_->at; }

  std::shared_ptr<Fault> fault_;
};

class BrokenTransport final : public transport::ForwardingTransport {
 public:
  BrokenTransport(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Fault> fault)
      : ForwardingTransport(std::move(inner)), fault_(std::move(fault)) {}
  std::unique_ptr<transport::Window> open(std::string_view label, size_t num_bytes, int num_signals) override {
    return std::make_unique<BrokenWindow>(inner_->open(label, num_bytes, num_signals), fault_, rank());
  }

 private:
  std::shared_ptr<Fault> fault_;
};

}  // namespace turnout::testing
