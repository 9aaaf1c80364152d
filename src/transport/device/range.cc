// Allocations and ranges by the driver's calls.
#include "transport/device/range.h"

#include <string>

namespace turnout::transport::device {

Allocation::~Allocation() {
  if (is_open_) driver().mem_release(handle_);
}

Allocation Allocation::make(int device, size_t num_bytes, bool for_processes) {
  CUmemAllocationProp where{};
  where.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  where.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  where.location.id = device;
  if (for_processes) where.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_create(&handle, num_bytes, &where, 0), "allocating " + std::to_string(num_bytes) + " bytes of device " + std::to_string(device));
  return Allocation(handle);
}

Allocation Allocation::import(const Descriptor& file, int rank) {
  CUmemGenericAllocationHandle handle = 0;
  void* const number = reinterpret_cast<void*>(static_cast<uintptr_t>(file.get()));
  check(driver().mem_import(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), "taking the memory of rank " + std::to_string(rank));
  return Allocation(handle);
}

Descriptor Allocation::share() const {
  int number = -1;
  check(driver().mem_export(&number, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "sharing memory by descriptor");
  return Descriptor(number);
}

Range::Range(size_t num_bytes, size_t alignment) : num_bytes_(num_bytes) {
  check(driver().mem_address_reserve(&address_, num_bytes, alignment, 0, 0), "reserving " + std::to_string(num_bytes) + " bytes of addresses");
}

Range::~Range() {
  detach();
  driver().mem_address_free(address_, num_bytes_);
}

void Range::attach(Allocation allocation, const std::vector<int>& devices) {
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

void Range::detach() {
  if (is_mapped_) driver().mem_unmap(address_, num_bytes_);
  is_mapped_ = false;
  allocation_ = Allocation();
}

}  // namespace turnout::transport::device
