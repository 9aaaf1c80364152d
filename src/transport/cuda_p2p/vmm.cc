// Threads of one process share one mapping: kernels that reach the same memory through two addresses at once would not be
// promised to see each other's writes (CUDA programming guide, "virtual aliasing"). Processes cannot but map it each for itself.
#include <algorithm>
#include <sstream>

#include "transport/cuda_p2p/cuda_p2p.h"
#include "transport/device/driver.h"
#include "transport/device/probe.h"
#include "transport/device/shared.h"
#include "transport/mailbox.h"

namespace turnout::transport::device {

namespace {

/// A piece of some GPU's memory. The driver keeps the memory as long as anybody has a handle or a mapping.
class Allocation {
 public:
  Allocation() = default;
  explicit Allocation(CUmemGenericAllocationHandle handle) : handle_(handle), is_open_(true) {}
  Allocation(Allocation&& other) noexcept : handle_(other.handle_), is_open_(std::exchange(other.is_open_, false)) {}
  Allocation& operator=(Allocation&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(is_open_, other.is_open_);
    return *this;
  }
  ~Allocation() {
    if (is_open_) driver().mem_release(handle_);
  }

  static Allocation make(int device, size_t num_bytes, bool for_processes) {
    CUmemAllocationProp where{};
    where.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    where.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    where.location.id = device;
    if (for_processes) where.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    check(driver().mem_create(&handle, num_bytes, &where, 0),
          "allocating " + std::to_string(num_bytes) + " bytes of device " + std::to_string(device));
    return Allocation(handle);
  }
  static Allocation import(const Descriptor& file, int rank) {
    CUmemGenericAllocationHandle handle = 0;
    void* const number = reinterpret_cast<void*>(static_cast<uintptr_t>(file.get()));
    check(driver().mem_import(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "taking the memory of rank " + std::to_string(rank));
    return Allocation(handle);
  }
  Descriptor share() const {
    int number = -1;
    check(driver().mem_export(&number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "sharing memory by descriptor");
    return Descriptor(number);
  }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  bool is_open_ = false;
};

/// Addresses reserved for one rank's memory, with or without memory behind them.
class Range {
 public:
  Range(size_t num_bytes, size_t alignment) : num_bytes_(num_bytes) {
    check(driver().mem_address_reserve(&address_, num_bytes, alignment, 0, 0), "reserving " + std::to_string(num_bytes) + " bytes of addresses");
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() {
    detach();
    driver().mem_address_free(address_, num_bytes_);
  }

  /// Puts memory behind the addresses, for kernels on `devices`.
  void attach(Allocation allocation, const std::vector<int>& devices) {
    check(driver().mem_map(address_, num_bytes_, 0, allocation.handle(), 0), "mapping memory");
    is_mapped_ = true;
    allocation_ = std::move(allocation);
    std::vector<CUmemAccessDesc> access(devices.size());
    for (size_t i = 0; i < devices.size(); ++i) {
      access[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access[i].location.id = devices[i];
      access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    check(driver().mem_set_access(address_, num_bytes_, access.data(), access.size()), "opening memory to its GPUs");
  }
  void detach() {
    if (is_mapped_) driver().mem_unmap(address_, num_bytes_);
    is_mapped_ = false;
    allocation_ = Allocation();
  }
  const Allocation& allocation() const { return allocation_; }
  std::byte* address() const { return reinterpret_cast<std::byte*>(address_); }

 private:
  const size_t num_bytes_;
  CUdeviceptr address_ = 0;
  bool is_mapped_ = false;
  Allocation allocation_;
};

ProcessTable<Range>& ranges() {
  static ProcessTable<Range> table;
  return table;
}

/// A whole number of the largest granules, so that every rank takes the same.
size_t round_up(size_t num_bytes, const std::vector<RankGpu>& gpus) {
  size_t granule = 1;
  for (const RankGpu& gpu : gpus) granule = std::max(granule, gpu.granularity);
  const size_t wanted = std::max(num_bytes, probe_bytes(static_cast<int>(gpus.size())));
  // A size that no GPU can have stays one, and is refused by the driver.
  return wanted > SIZE_MAX - granule ? SIZE_MAX / granule * granule : (wanted + granule - 1) / granule * granule;
}

class VmmWindow final : public WindowBase {
 public:
  VmmWindow(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes)
      : WindowBase(bootstrap, gpus, num_bytes), mapped_bytes_(round_up(num_bytes, gpus)), ranges_(gpus.size()) {
    fill("cuda_p2p: open");
  }

  std::string_view transport() const override { return "cuda_p2p"; }
  DeviceLink link(int rank) const override { return link_by_gpu(rank); }

  void suspend() override {
    if (is_suspended_) throw InvalidArgument("device window: suspend() of a window that is suspended already");
    bootstrap_.barrier("cuda_p2p: suspend: quiet");
    empty();
    is_suspended_ = true;
    bootstrap_.barrier("cuda_p2p: suspend: freed");
  }

  void resume() override {
    if (!is_suspended_) throw InvalidArgument("device window: resume() of a window that is not suspended");
    try {
      fill("cuda_p2p: resume");
    } catch (...) {
      empty();
      throw;
    }
    is_suspended_ = false;
  }

 private:
  /// Fresh memory behind every range. Ranges are made once, so addresses stay.
  void fill(const std::string& step) {
    Descriptor file;
    Mailbox mailbox;
    const auto made = tell_all(bootstrap_, step + ": memory", std::to_string(mapped_bytes_) + " bytes", [&] { return make_own(file, mailbox); });
    require_agreed(made, rank_, step + ": memory");
    const auto taken = tell_all(bootstrap_, step + ": taken", "", [&] {
      take_others(made, file, mailbox);
      return std::string();
    });
    require_agreed(taken, rank_, step + ": taken");
    probe(bootstrap_, step, addresses_, mine().device);
  }

  /// This rank's memory, zero; returns its number in this process and the name of its mailbox.
  std::string make_own(Descriptor& file, Mailbox& mailbox) {
    const CurrentDevice current(mine().device);
    range(static_cast<size_t>(rank_)).attach(Allocation::make(mine().device, mapped_bytes_, has_strangers()), devices_of_this_process());
    const auto& own = ranges_[static_cast<size_t>(rank_)];
    clear(mine().device, own->address(), mapped_bytes_);
    std::string words = ranges().publish(own);
    if (has_strangers()) {
      Descriptor shared = own->allocation().share();
      mailbox.open();
      words += " " + mailbox.name();
      file = std::move(shared);
    }
    return words;
  }

  void take_others(const std::vector<Said>& made, const Descriptor& file, Mailbox& mailbox) {
    const CurrentDevice current(mine().device);
    std::vector<std::string> names;
    for (size_t rank = 0; rank < made.size(); ++rank) {
      std::istringstream words(made[rank].made);
      std::string number, name;
      words >> number >> name;
      names.push_back(name);
      if (!in_this_process(rank) || static_cast<int>(rank) == rank_) continue;
      ranges_[rank] = ranges().find(number, static_cast<int>(rank));
      addresses_[rank] = ranges_[rank]->address();
    }
    if (!has_strangers()) return;
    mailbox.exchange(names, rank_, file, [&](int peer, const Descriptor& theirs, int) {
      if (in_this_process(static_cast<size_t>(peer))) return;
      range(static_cast<size_t>(peer)).attach(Allocation::import(theirs, peer), {mine().device});
    });
  }

  /// The range for this rank's memory or that of a rank in another process.
  Range& range(size_t rank) {
    if (!ranges_[rank]) {
      size_t granule = 0;
      for (const RankGpu& gpu : gpus_) granule = std::max(granule, gpu.granularity);
      ranges_[rank] = std::make_shared<Range>(mapped_bytes_, granule);
      addresses_[rank] = ranges_[rank]->address();
    }
    return *ranges_[rank];
  }

  /// Ranges of other ranks of this process are theirs to empty.
  void empty() {
    for (size_t rank = 0; rank < ranges_.size(); ++rank) {
      if (ranges_[rank] && (static_cast<int>(rank) == rank_ || !in_this_process(rank))) ranges_[rank]->detach();
    }
  }

  const size_t mapped_bytes_;
  std::vector<std::shared_ptr<Range>> ranges_;
  bool is_suspended_ = false;
};

}  // namespace

std::unique_ptr<DeviceWindow> open_vmm(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes) {
  return std::make_unique<VmmWindow>(bootstrap, gpus, num_bytes);
}

}  // namespace turnout::transport::device
