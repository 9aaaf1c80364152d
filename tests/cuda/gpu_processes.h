// Ranks on GPUs as processes, forked before the driver is started.
#pragma once
#include <sys/mman.h>

#include <atomic>
#include <new>

#include "cuda/gpu_test.h"
#include "transport/processes.h"
#include "turnout/turnout.hpp"

namespace turnout::testing {

using transport::testing::Family;
using transport::testing::Pipe;
using transport::testing::require;

/// Each process is a rank of one Communicator. What a comparison finds there, the child prints and ends with status 1.
inline std::function<void(const std::shared_ptr<Store>&, int)> as_rank(int num_ranks, const std::function<void(Communicator&)>& body,
                                                                       CommunicatorOptions options = {}) {
  return [=](const std::shared_ptr<Store>& store, int rank) {
    CommunicatorOptions own = options;
    own.transport = "shm";
    own.timeout = std::chrono::seconds(20);
    Communicator comm = Communicator::from_store(store, rank, num_ranks, "world", own);
    body(comm);
    std::fflush(stdout);
    require(!::testing::Test::HasFailure(), "a comparison failed");
    comm.barrier();
  };
}

/// Memory that parent and children share.
template <class T>
class SharedBy {
 public:
  SharedBy() {
    void* p = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(p != MAP_FAILED, "mmap");
    value_ = new (p) T{};
  }
  ~SharedBy() { munmap(value_, sizeof(T)); }
  SharedBy(const SharedBy&) = delete;
  SharedBy& operator=(const SharedBy&) = delete;
  T* operator->() const { return value_; }

 private:
  T* value_;
};

/// Words that host and kernels of this process share.
class MappedWords {
 public:
  explicit MappedWords(size_t num_words) {
    void* p = nullptr;
    cuda_ok(cudaHostAlloc(&p, num_words * 4, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(p, 0, num_words * 4);
    words_ = static_cast<uint32_t*>(p);
  }
  ~MappedWords() { cudaFreeHost(words_); }
  MappedWords(const MappedWords&) = delete;
  MappedWords& operator=(const MappedWords&) = delete;
  uint32_t* at(size_t i) const { return words_ + i; }
  uint32_t read(size_t i) const { return static_cast<const volatile uint32_t*>(words_)[i]; }
  void write(size_t i, uint32_t value) const { static_cast<volatile uint32_t*>(words_)[i] = value; }
  /// Until word `i` is at least `value`.
  void wait(size_t i, uint32_t value, const std::string& what) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (read(i) < value) require(std::chrono::steady_clock::now() < until, what + ": " + std::to_string(read(i)) + " of " + std::to_string(value));
  }

 private:
  uint32_t* words_ = nullptr;
};

}  // namespace turnout::testing
