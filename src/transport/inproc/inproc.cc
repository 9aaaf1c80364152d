// One heap region per rank and window, shared by reference among the threads.
#include "transport/inproc/inproc.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "transport/agree.h"
#include "transport/doorbell.h"
#include "transport/inproc/scheduler.h"

namespace turnout::transport {

namespace {

/// The memory of one rank in one window.
struct Region {
  Region(size_t bytes, int num_signals) : num_bytes(bytes), signals(static_cast<size_t>(num_signals)) {
    memory = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      throw TransportError("inproc: no address space for a window of " + std::to_string(bytes) + " bytes: " + std::strerror(errno) +
                           "; make the Buffer smaller, or raise the limit of address space (ulimit -v)");
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(memory, num_bytes ? num_bytes : 1); }

  std::byte* data() const { return static_cast<std::byte*>(memory); }

  void* memory = nullptr;
  size_t num_bytes;
  Doorbell bell;
  std::vector<std::atomic<uint64_t>> signals;
};

/// What virtual ranks know of each other.
struct RankState {
  std::atomic<bool> alive{true};
};

/// The objects that ranks of this process are handing to each other, by names that nothing else ever has: what lies in a store may be
/// old, or another process's, and then its name says so.
class Registry {
 public:
  static Registry& instance() {
    static Registry& registry = *std::make_unique<Registry>().release();  // threads may use it while the process ends
    return registry;
  }
  Registry() {
    if (getrandom(&next_, sizeof next_, 0) != sizeof next_) next_ = static_cast<uint64_t>(getpid()) << 40;
  }
  uint64_t add(std::weak_ptr<void> object) {
    std::lock_guard lock(mutex_);
    objects_.emplace(next_, std::move(object));
    return next_++;
  }
  void remove(uint64_t name) {
    std::lock_guard lock(mutex_);
    objects_.erase(name);
  }
  std::shared_ptr<void> find(uint64_t name) {
    std::lock_guard lock(mutex_);
    const auto found = objects_.find(name);
    return found == objects_.end() ? nullptr : found->second.lock();
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, std::weak_ptr<void>> objects_;
  uint64_t next_ = 0;
};

/// Keeps a name in the registry.
struct Entry {
  uint64_t name = 0;
  Entry() = default;
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry() {
    if (name != 0) Registry::instance().remove(name);
  }
};

/// Hands a shared object to all ranks, which are threads of one process. No step of the same name hands another type.
template <class T, class Make>
std::vector<std::shared_ptr<T>> exchange(Bootstrap& bootstrap, const std::string& step, const std::string& facts, Make make) {
  std::shared_ptr<T> mine;
  Entry entry;
  const auto said = tell_all(bootstrap, step, facts, [&] {
    mine = make();
    entry.name = Registry::instance().add(mine);
    return std::string(reinterpret_cast<const char*>(&entry.name), sizeof entry.name);
  });
  check_agreed(said, bootstrap.rank(), step);

  std::vector<std::shared_ptr<T>> peers;
  const auto taken = tell_all(bootstrap, step + ": taken", "", [&] {
    for (const Said& peer : said) {
      uint64_t name = 0;
      std::memcpy(&name, peer.made.data(), std::min(peer.made.size(), sizeof name));
      peers.push_back(std::static_pointer_cast<T>(Registry::instance().find(name)));
      if (!peers.back()) throw TransportError(step + ": rank " + std::to_string(peers.size() - 1) + " has given up");
    }
    return std::string();
  });
  check_agreed(taken, bootstrap.rank(), step);
  return peers;
}

class InprocWindow final : public Window {
 public:
  InprocWindow(int rank, std::vector<std::shared_ptr<Region>> regions, std::shared_ptr<Scheduler> scheduler)
      : rank_(rank), regions_(std::move(regions)), scheduler_(std::move(scheduler)) {}
  ~InprocWindow() override {
    if (scheduler_) scheduler_->leave(rank_);
  }

  size_t num_bytes() const override { return mine().num_bytes; }
  int num_signals() const override { return static_cast<int>(mine().signals.size()); }
  std::byte* local() override { return mine().data(); }
  std::byte* peer_ptr(int peer) override { return scheduler_ && peer != rank_ ? nullptr : region(peer).data(); }

  void put(int peer, size_t offset, const void* src, size_t num_bytes) override {
    if (num_bytes == 0) return;
    if (scheduler_ && peer != rank_) {
      scheduler_->put(rank_, peer, offset, src, num_bytes);
      region(peer).bell.ring();
    } else {
      std::memcpy(region(peer).data() + offset, src, num_bytes);
    }
  }

  void signal(int peer, int index, uint64_t value) override {
    if (scheduler_ && peer != rank_) scheduler_->signal(rank_, peer, index, value);
    else region(peer).signals[static_cast<size_t>(index)].store(value, std::memory_order_release);  // publishes the rows before it
    region(peer).bell.ring();
  }

  const std::atomic<uint64_t>* signals() const override { return mine().signals.data(); }

  void progress() override {
    if (scheduler_) deliver();
  }
  uint32_t arm() override { return mine().bell.arm(); }
  void sleep(uint32_t ticket) override {
    if (!scheduler_ || !deliver()) mine().bell.sleep(ticket);
    else std::this_thread::yield();  // what is under way lands by time, not by a ring
  }
  void disarm() override { mine().bell.disarm(); }

 private:
  Region& mine() const { return *regions_[static_cast<size_t>(rank_)]; }
  Region& region(int peer) const { return *regions_[static_cast<size_t>(peer)]; }
  bool deliver() {
    Region& here = mine();
    return scheduler_->deliver(
        rank_, [&](size_t offset, const std::byte* data, size_t num_bytes) { std::memcpy(here.data() + offset, data, num_bytes); },
        [&](int, int index, uint64_t value) {
          here.signals[static_cast<size_t>(index)].store(value, std::memory_order_release);
          here.bell.ring();
        });
  }

  const int rank_;
  const std::vector<std::shared_ptr<Region>> regions_;
  const std::shared_ptr<Scheduler> scheduler_;
};

class InprocTransport final : public Transport {
 public:
  InprocTransport(std::unique_ptr<Bootstrap> bootstrap, uint64_t seed)
      : bootstrap_(std::move(bootstrap)), seed_(seed), mine_(std::make_shared<RankState>()) {
    ranks_ = exchange<RankState>(*bootstrap_, "inproc: ranks", "", [&] { return mine_; });
    spin_ = spin_time(num_ranks());
  }
  ~InprocTransport() override { mine_->alive.store(false, std::memory_order_release); }

  std::string_view name() const override { return "inproc"; }
  int rank() const override { return bootstrap_->rank(); }
  int num_ranks() const override { return bootstrap_->num_ranks(); }

  std::unique_ptr<Window> open(std::string_view label, size_t num_bytes, int num_signals) override {
    const std::string step = "inproc: window " + std::string(label);
    const std::string facts = std::to_string(num_bytes) + " bytes and " + std::to_string(num_signals) + " signals";
    auto regions = exchange<Region>(*bootstrap_, step, facts, [&] { return std::make_shared<Region>(num_bytes, num_signals); });
    std::shared_ptr<Scheduler> scheduler;
    if (seed_ != 0) {
      // Rank 0's scheduler serves all; every window has its own.
      const uint64_t seed = seed_ + num_windows_++;
      scheduler = exchange<Scheduler>(*bootstrap_, step + ": scheduler", "", [&] { return std::make_shared<Scheduler>(seed, num_ranks()); })[0];
    }
    return std::make_unique<InprocWindow>(rank(), std::move(regions), std::move(scheduler));
  }

  PeerState peer_state(int peer) const override {
    return ranks_[static_cast<size_t>(peer)]->alive.load(std::memory_order_acquire) ? PeerState::alive : PeerState::gone;
  }
  /// A thread of a running process runs: time stands for its heartbeat.
  uint64_t heartbeat(int) const override { return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / kHeartbeat); }
  std::chrono::nanoseconds spin() const override { return spin_; }

 private:
  std::unique_ptr<Bootstrap> bootstrap_;
  const uint64_t seed_;
  uint64_t num_windows_ = 0;
  std::shared_ptr<RankState> mine_;
  std::vector<std::shared_ptr<RankState>> ranks_;
  std::chrono::nanoseconds spin_{};
};

}  // namespace

std::shared_ptr<Transport> make_inproc(Bootstrap& bootstrap, uint64_t scheduler_seed) {
  std::vector<int> everyone(static_cast<size_t>(bootstrap.num_ranks()));
  for (size_t rank = 0; rank < everyone.size(); ++rank) everyone[rank] = static_cast<int>(rank);
  return std::make_shared<InprocTransport>(bootstrap.sub_group(everyone, "inproc"), scheduler_seed);
}

}  // namespace turnout::transport
