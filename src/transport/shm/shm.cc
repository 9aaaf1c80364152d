// A window is one sealed memory file per rank: doorbell, signals, then the data. A control file per rank holds its heartbeat.
#include "transport/shm/shm.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "transport/doorbell.h"
#include "transport/shm/descriptor.h"

namespace turnout::transport {

namespace {

constexpr size_t kPage = 4096;
constexpr size_t up(size_t n) { return (n + kPage - 1) / kPage * kPage; }

/// What a rank's process tells of itself: in its control file.
struct Control {
  std::atomic<uint64_t> heartbeat;
  std::atomic<uint64_t> left;  ///< 1 once the transport was destroyed in an orderly way
};

class ShmWindow final : public Window {
 public:
  ShmWindow(Bootstrap& bootstrap, std::string_view label, size_t num_bytes, int num_signals)
      : rank_(bootstrap.rank()), num_bytes_(num_bytes), num_signals_(num_signals) {
    data_at_ = up(sizeof(Doorbell) + static_cast<size_t>(num_signals) * sizeof(uint64_t));
    const size_t total = data_at_ + up(num_bytes ? num_bytes : 1);
    const Descriptor mine = make_memory_file(label, total);
    auto files = exchange_descriptors(bootstrap, "shm: window " + std::string(label), mine);
    for (PeerFile& peer : files) maps_.emplace_back(peer.file, total);
  }

  size_t num_bytes() const override { return num_bytes_; }
  int num_signals() const override { return num_signals_; }
  std::byte* local() override { return data(rank_); }
  std::byte* peer_ptr(int peer) override { return data(peer); }
  void put(int peer, size_t offset, const void* src, size_t num_bytes) override {
    if (num_bytes > 0) std::memcpy(data(peer) + offset, src, num_bytes);
  }
  void signal(int peer, int index, uint64_t value) override {
    signal_at(peer, index).store(value, std::memory_order_release);  // publishes the rows stored before it
    bell(peer).ring();
  }
  uint64_t read(int index) const override { return signal_at(rank_, index).load(std::memory_order_acquire); }
  uint32_t ticket() const override { return bell(rank_).ticket(); }
  void idle(uint32_t ticket, std::chrono::nanoseconds spin) override { bell(rank_).wait(ticket, spin); }

 private:
  std::byte* data(int peer) const { return maps_[static_cast<size_t>(peer)].data() + data_at_; }
  // A new memory file is all zeros, which is what these begin as.
  Doorbell& bell(int peer) const { return *reinterpret_cast<Doorbell*>(maps_[static_cast<size_t>(peer)].data()); }
  std::atomic<uint64_t>& signal_at(int peer, int index) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(maps_[static_cast<size_t>(peer)].data() + sizeof(Doorbell))[index];
  }

  const int rank_;
  const size_t num_bytes_;
  const int num_signals_;
  size_t data_at_ = 0;
  std::vector<Mapping> maps_;
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(std::unique_ptr<Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)), gone_(static_cast<size_t>(bootstrap_->num_ranks())) {
    const Descriptor mine = make_memory_file("control", kPage);
    auto files = exchange_descriptors(*bootstrap_, "shm: control", mine);
    for (PeerFile& peer : files) {
      controls_.emplace_back(peer.file, kPage);
      // Threads of this process need no watching: they cannot die without us.
      pidfds_.emplace_back(peer.pid == getpid() ? -1 : static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
      if (peer.pid != getpid() && !pidfds_.back()) gone_[pidfds_.size() - 1].store(true, std::memory_order_release);
    }
    stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
    if (!stop_) throw TransportError(std::string("shm: no eventfd: ") + std::strerror(errno));
    spin_ = spin_time(num_ranks());
    service_ = std::thread([this] { serve(); });
  }
  ~ShmTransport() override {
    control(rank()).left.store(1, std::memory_order_release);
    const uint64_t one = 1;
    if (write(stop_.get(), &one, sizeof one) < 0) stopping_.store(true, std::memory_order_release);
    service_.join();
  }

  std::string_view name() const override { return "shm"; }
  int rank() const override { return bootstrap_->rank(); }
  int num_ranks() const override { return bootstrap_->num_ranks(); }
  std::unique_ptr<Window> open(std::string_view label, size_t num_bytes, int num_signals) override {
    return std::make_unique<ShmWindow>(*bootstrap_, label, num_bytes, num_signals);
  }
  PeerState peer_state(int peer) const override {
    const auto at = static_cast<size_t>(peer);
    const bool gone = gone_[at].load(std::memory_order_acquire) || control(peer).left.load(std::memory_order_acquire) != 0;
    return gone ? PeerState::gone : PeerState::alive;
  }
  uint64_t heartbeat(int peer) const override { return control(peer).heartbeat.load(std::memory_order_relaxed); }
  std::chrono::nanoseconds spin() const override { return spin_; }

 private:
  Control& control(int peer) const { return *reinterpret_cast<Control*>(controls_[static_cast<size_t>(peer)].data()); }

  /// The service thread: a heartbeat every 100 ms, and who has died meanwhile.
  void serve() {
    while (!stopping_.load(std::memory_order_acquire)) {
      control(rank()).heartbeat.fetch_add(1, std::memory_order_relaxed);
      std::vector<pollfd> watched = {{stop_.get(), POLLIN, 0}};
      for (size_t peer = 0; peer < pidfds_.size(); ++peer) {
        const bool watch = pidfds_[peer] && !gone_[peer].load(std::memory_order_relaxed);
        watched.push_back({watch ? pidfds_[peer].get() : -1, POLLIN, 0});
      }
      if (poll(watched.data(), watched.size(), 100) <= 0) continue;
      if (watched[0].revents) return;
      for (size_t peer = 0; peer < pidfds_.size(); ++peer) {
        if (watched[peer + 1].revents) gone_[peer].store(true, std::memory_order_release);
      }
    }
  }

  std::unique_ptr<Bootstrap> bootstrap_;
  std::vector<Mapping> controls_;
  std::vector<Descriptor> pidfds_;
  std::vector<std::atomic<bool>> gone_;
  Descriptor stop_;
  std::atomic<bool> stopping_{false};
  std::chrono::nanoseconds spin_{};
  std::thread service_;
};

}  // namespace

std::shared_ptr<Transport> make_shm(Bootstrap& bootstrap) {
  std::vector<int> everyone(static_cast<size_t>(bootstrap.num_ranks()));
  for (size_t rank = 0; rank < everyone.size(); ++rank) everyone[rank] = static_cast<int>(rank);
  return std::make_shared<ShmTransport>(bootstrap.sub_group(everyone, "shm"));
}

}  // namespace turnout::transport
