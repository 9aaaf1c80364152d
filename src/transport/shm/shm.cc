// A window is one sealed memory file per rank: doorbell, signals, then the data. A control file per rank holds its heartbeat.
#include "transport/shm/shm.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "transport/agree.h"
#include "transport/descriptor.h"
#include "transport/doorbell.h"
#include "transport/window_bytes.h"
#include "util/process.h"

namespace turnout::transport {

namespace {

constexpr size_t kMostBytes = size_t{1} << 62;

/// What a rank's process tells of itself: in its control file.
struct Control {
  std::atomic<uint64_t> heartbeat{0};
  std::atomic<uint64_t> left{0};      ///< 1 once the transport was destroyed in an orderly way
  std::atomic<uint64_t> visitors{0};  ///< ranks that have written here: the probe that memory is shared
};

class ShmWindow final : public Window {
 public:
  ShmWindow(Bootstrap& bootstrap, std::string_view label, size_t num_bytes, int num_signals)
      : rank_(bootstrap.rank()), num_bytes_(num_bytes), num_signals_(num_signals) {
    data_at_ = window_data_at(num_signals);
    // A size that no address can reach stays one after rounding up, so that the kernel refuses it.
    const size_t total = num_bytes > kMostBytes ? kMostBytes : window_bytes(num_bytes, num_signals);
    const std::string facts = std::to_string(num_bytes) + " bytes and " + std::to_string(num_signals) + " signals";
    memory_ = share_memory(bootstrap, "window " + std::string(label), facts, total, [&](std::byte* mine) {
      new (mine) Doorbell;
      for (int i = 0; i < num_signals; ++i)
        new (mine + sizeof(Doorbell) + static_cast<size_t>(i) * sizeof(std::atomic<uint64_t>)) std::atomic<uint64_t>(0);
    });
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
  const std::atomic<uint64_t>* signals() const override { return &signal_at(rank_, 0); }
  uint32_t arm() override { return bell(rank_).arm(); }
  void sleep(uint32_t ticket) override { bell(rank_).sleep(ticket); }
  void disarm() override { bell(rank_).disarm(); }

 private:
  std::byte* data(int peer) const { return memory_[static_cast<size_t>(peer)].map.data() + data_at_; }
  // Their owner constructed these before any peer had the file.
  Doorbell& bell(int peer) const { return *reinterpret_cast<Doorbell*>(memory_[static_cast<size_t>(peer)].map.data()); }
  std::atomic<uint64_t>& signal_at(int peer, int index) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(memory_[static_cast<size_t>(peer)].map.data() + sizeof(Doorbell))[index];
  }

  const int rank_;
  const size_t num_bytes_;
  const int num_signals_;
  size_t data_at_ = 0;
  std::vector<PeerMemory> memory_;
};

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(std::unique_ptr<Bootstrap> bootstrap)
      : bootstrap_(std::move(bootstrap)), gone_(static_cast<size_t>(bootstrap_->num_ranks())) {
    controls_ = share_memory(*bootstrap_, "control", "a control page", kPage, [](std::byte* mine) { new (mine) Control; });
    const auto watching = tell_all(*bootstrap_, "shm: watch", "", [&] {
      for (size_t peer = 0; peer < controls_.size(); ++peer) pidfds_.push_back(watch(peer));
      stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
      if (!stop_) fail("no eventfd", errno);
      for (int peer = 0; peer < num_ranks(); ++peer) control(peer).visitors.fetch_add(1, std::memory_order_acq_rel);
      return std::string();
    });
    check_agreed(watching, bootstrap_->rank(), "shm: watch");
    spin_ = spin_time(num_ranks());
    try {
      const auto started = tell_all(*bootstrap_, "shm: start", "", [&] {
        check_visitors();
        start_service();
        return std::string();
      });
      check_agreed(started, bootstrap_->rank(), "shm: start");
    } catch (...) {
      stop_service();  // ours runs, but that of another rank may not
      throw;
    }
  }
  ~ShmTransport() override {
    if (process_.is_this()) control(rank()).left.store(1, std::memory_order_release);
    stop_service();
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
  Control& control(int peer) const { return *reinterpret_cast<Control*>(controls_[static_cast<size_t>(peer)].map.data()); }

  /// A descriptor that becomes readable when the process of `peer` ends; none if it needs no watching or cannot be watched.
  Descriptor watch(size_t peer) {
    const int pid = controls_[peer].pid;
    // Threads of this process cannot die without us. A process in a pid namespace that we cannot see (pid 0) has only its heartbeat.
    if (pid == getpid() || pid <= 0) return Descriptor();
    Descriptor process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
    if (process) return process;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) fail("cannot watch the process of rank " + std::to_string(peer), errno);
    // Any other reason (an old kernel, a sandbox): the heartbeat must do.
    if (errno == ESRCH) gone_[peer].store(true, std::memory_order_release);
    return Descriptor();
  }

  /// Every rank has written here by now; a kernel that passes descriptors but does not share their memory is found out.
  void check_visitors() const {
    const uint64_t seen = control(rank()).visitors.load(std::memory_order_acquire);
    if (seen == static_cast<uint64_t>(num_ranks())) return;
    throw TransportError("shm: memory passed by descriptor is not shared: of " + std::to_string(num_ranks()) + " ranks that wrote, " +
                         std::to_string(seen) + " are seen; run all ranks under one kernel, outside of sandboxes that emulate it");
  }

  void stop_service() {
    if (!process_.is_this()) {  // the thread is the parent's, and so is the descriptor that stops it
      util::leave_to_parent(service_);
      return;
    }
    const uint64_t one = 1;
    if (write(stop_.get(), &one, sizeof one) < 0) stopping_.store(true, std::memory_order_release);
    if (service_.joinable()) service_.join();
  }

  /// The program's signal handlers run on the program's threads, not on ours.
  void start_service() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto restore = [&] { pthread_sigmask(SIG_SETMASK, &before, nullptr); };
    try {
      service_ = std::thread([this] { serve(); });
    } catch (const std::system_error& error) {
      restore();
      fail("cannot start the service thread", error.code().value());
    }
    restore();
  }

  /// The service thread: the heartbeat, and who has died meanwhile.
  void serve() {
    while (!stopping_.load(std::memory_order_acquire)) {
      control(rank()).heartbeat.fetch_add(1, std::memory_order_relaxed);
      std::vector<pollfd> watched = {{stop_.get(), POLLIN, 0}};
      for (size_t peer = 0; peer < pidfds_.size(); ++peer) {
        const bool watch = pidfds_[peer] && !gone_[peer].load(std::memory_order_relaxed);
        watched.push_back({watch ? pidfds_[peer].get() : -1, POLLIN, 0});
      }
      if (poll(watched.data(), watched.size(), static_cast<int>(kHeartbeat.count())) <= 0) continue;
      if (watched[0].revents) return;
      for (size_t peer = 0; peer < pidfds_.size(); ++peer) {
        if (watched[peer + 1].revents) gone_[peer].store(true, std::memory_order_release);
      }
    }
  }

  const util::Process process_;
  std::unique_ptr<Bootstrap> bootstrap_;
  std::vector<PeerMemory> controls_;
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
