#include "tools/shared_arena.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

namespace turnout::tools {

namespace {

constexpr int kMaxRanks = 256;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t n) { return (n + kHugePage - 1) / kHugePage * kHugePage; }

void touch(std::byte* data, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; i += 4096) data[i] = std::byte{0};
}

/// Where the first rank keeps the memory.
struct Ticket {
  std::array<char, 64> machine{};
  int64_t process = 0, descriptor = -1;
  std::byte* address = nullptr;
};

}  // namespace

struct SharedArena::Control {
  struct alignas(128) Slot {
    std::atomic<uint64_t> arrived{0};
    std::atomic<double> value{0};
  };
  std::array<Slot, kMaxRanks> slots;
  std::atomic<int> threads{0};  ///< ranks that use the first rank's mapping
};

SharedArena::SharedArena(Communicator& communicator, size_t num_bytes)
    : rank_(communicator.rank()), num_ranks_(communicator.num_ranks()), yields_(num_ranks_ > static_cast<int>(std::thread::hardware_concurrency())) {
  const size_t front = round_up(sizeof(Control));
  total_ = front + round_up(num_bytes);
  Ticket mine;
  gethostname(mine.machine.data(), mine.machine.size() - 1);
  mine.process = getpid();
  if (rank_ == 0) {
    mine.descriptor = memfd_create("turnout-bench", MFD_CLOEXEC);
    if (mine.descriptor >= 0 && ftruncate(static_cast<int>(mine.descriptor), static_cast<off_t>(total_)) == 0) {
      void* at = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(mine.descriptor), 0);
      if (at != MAP_FAILED) mine.address = static_cast<std::byte*>(at);
    }
  }
  const auto all = communicator.all_gather(std::as_bytes(std::span(&mine, 1)));
  Ticket first;
  std::memcpy(&first, all[0].data(), sizeof first);
  std::string trouble;
  if (!first.address) trouble = "no shared memory of " + std::to_string(total_ >> 20) + " MiB for the limits of the benchmark";
  if (num_ranks_ > kMaxRanks) trouble = "the benchmark takes at most " + std::to_string(kMaxRanks) + " ranks";
  if (first.machine != mine.machine) trouble = "the benchmark needs all ranks on one machine: rank " + std::to_string(rank_) + " is on another";
  if (trouble.empty()) {
    base_ = first.address;
    if (first.process != mine.process) {
      const std::string path = "/proc/" + std::to_string(first.process) + "/fd/" + std::to_string(first.descriptor);
      const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      void* at = fd < 0 ? MAP_FAILED : mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (at == MAP_FAILED) trouble = "cannot map the benchmark's shared memory (" + path + "): " + std::strerror(errno);
      if (fd >= 0) close(fd);
      base_ = at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
    } else {
      shares_ = true;
      ++control()->threads;
    }
  }
  // All or none: a rank that failed must not leave the others waiting in a barrier.
  const char good = trouble.empty();
  for (const auto& answer : communicator.all_gather(std::as_bytes(std::span(&good, 1)))) {
    if (trouble.empty() && answer[0] == std::byte{0}) trouble = "another rank cannot map the benchmark's shared memory";
  }
  if (rank_ == 0 && mine.descriptor >= 0) close(static_cast<int>(mine.descriptor));
  if (!trouble.empty()) throw TransportError(trouble);
  madvise(base_, total_, MADV_HUGEPAGE);
  data_ = base_ + front;
  if (rank_ == 0) touch(data_, total_ - front);
  communicator.barrier();
  if (rank_ != 0) {
    for (size_t i = 0; i < total_ - front; i += 4096) static_cast<void>(*static_cast<volatile std::byte*>(data_ + i));
  }
  communicator.barrier();
}

SharedArena::~SharedArena() {
  // The mapping that several threads use goes with the last of them.
  if (base_ && (!shares_ || --control()->threads == 0)) munmap(base_, total_);
}

void SharedArena::barrier() {
  ++round_;
  std::chrono::steady_clock::time_point deadline{};
  control()->slots[static_cast<size_t>(rank_)].arrived.store(round_, std::memory_order_release);
  for (int r = 0; r < num_ranks_; ++r) {
    int spins = 0;
    while (control()->slots[static_cast<size_t>(r)].arrived.load(std::memory_order_acquire) < round_) {
      if (!yields_ && ++spins < 20000) continue;
      sched_yield();
      const auto now = std::chrono::steady_clock::now();
      if (deadline == std::chrono::steady_clock::time_point{}) deadline = now + std::chrono::minutes(5);
      if (now > deadline) throw TransportError("rank " + std::to_string(r) + " did not reach the benchmark's barrier within 5 minutes");
    }
  }
}

double SharedArena::max(double value) {
  control()->slots[static_cast<size_t>(rank_)].value.store(value, std::memory_order_relaxed);
  barrier();
  for (int r = 0; r < num_ranks_; ++r) value = std::max(value, control()->slots[static_cast<size_t>(r)].value.load(std::memory_order_relaxed));
  barrier();
  return value;
}

std::vector<double> SharedArena::max(const std::vector<double>& values) {
  std::vector<double> all;
  for (const double value : values) all.push_back(max(value));
  return all;
}

WarmMemory::WarmMemory(size_t num_bytes) : data_(nullptr), num_bytes_(round_up(std::max<size_t>(num_bytes, 1))) {
  void* at = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw TransportError("no memory of " + std::to_string(num_bytes_ >> 20) + " MiB for the benchmark");
  data_ = static_cast<std::byte*>(at);
  madvise(data_, num_bytes_, MADV_HUGEPAGE);
  touch(data_, num_bytes_);
}

WarmMemory::~WarmMemory() { munmap(data_, num_bytes_); }

}  // namespace turnout::tools
