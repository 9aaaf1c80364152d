// Transports move bytes and signals between ranks; they know nothing of tokens. This page is all an engine sees of one.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace turnout::transport {

/// How a peer's process looks from here.
enum class PeerState { alive, gone };

/// Symmetric memory: the same size and offsets on every rank, plus this rank's signals.
/// A signal is a 64-bit counter that only grows; each has exactly one writer (a rank), so "set to a larger value" is enough.
/// All methods may be called from several threads.
class Window {
 public:
  virtual ~Window() = default;
  virtual size_t num_bytes() const = 0;
  virtual int num_signals() const = 0;

  /// This rank's memory; zero when the window is opened; page-aligned.
  virtual std::byte* local() = 0;
  /// The memory of `peer` as this process can load and store it, or null if it cannot; the same at every call. For this rank: local().
  virtual std::byte* peer_ptr(int peer) = 0;

  /// Copies `num_bytes` to `offset` of the memory of `peer`. The source may be reused when it returns.
  /// REQUIRES: the range lies in the window. Throws: TransportError, PeerFailed.
  virtual void put(int peer, size_t offset, const void* src, size_t num_bytes) = 0;

  /// Raises signal `index` of `peer` to `value`, after every earlier put() and store through peer_ptr() of the calling
  /// thread has landed there. Never waits for the peer. A gone peer is ignored.
  /// REQUIRES: this rank is the only writer of (peer, index); `value` is not smaller than before.
  virtual void signal(int peer, int index, uint64_t value) = 0;

  /// Value of this rank's own signal `index`; what was put before it was raised is visible afterwards (acquire).
  uint64_t read(int index) const { return signals()[index].load(std::memory_order_acquire); }
  /// This rank's own signals, num_signals() of them; they stay where they are.
  virtual const std::atomic<uint64_t>* signals() const = 0;

  /// Moves what needs a processor to move (network, delayed delivery). Called in every wait loop.
  virtual void progress() {}

  /// The calling thread is about to sleep: signals of this rank that are raised from now on end sleep(ticket). One that is
  /// raised at the very moment may be missed, so poll for some microseconds more, as Idler does (idler.h).
  virtual uint32_t arm() = 0;
  /// Sleeps until a signal rises, or has risen since arm(); about a millisecond at most. Spurious returns are allowed.
  virtual void sleep(uint32_t ticket) = 0;
  /// Undoes arm().
  virtual void disarm() = 0;
};

/// How often a rank's heartbeat advances while its process runs.
constexpr std::chrono::milliseconds kHeartbeat{100};

/// A group of ranks that reach each other in one way.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;

  /// Opens symmetric memory. Collective: all ranks with the same arguments, in the same order.
  /// Destroying a window is local and never waits; peers that still hold it mapped keep their mapping.
  /// Throws: TransportError with what could not be had (and the limit to raise), PeerTimeout.
  virtual std::unique_ptr<Window> open(std::string_view label, size_t num_bytes, int num_signals) = 0;

  /// Whether the process (or virtual rank) of `peer` still exists, as the service thread last saw it.
  virtual PeerState peer_state(int peer) const = 0;
  /// A counter that the service thread of `peer` advances every kHeartbeat or so while its process runs.
  virtual uint64_t heartbeat(int peer) const = 0;
  /// How long a wait should spin before it sleeps: short when ranks of this machine outnumber its cores.
  virtual std::chrono::nanoseconds spin() const = 0;
};

}  // namespace turnout::transport
