// What a window costs a rank: its doorbell and signals, then its data, in whole pages.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/doorbell.h"

namespace turnout::transport {

inline constexpr size_t kPage = 4096;
constexpr size_t whole_pages(size_t n) { return (n + kPage - 1) / kPage * kPage; }

/// Where the data starts.
constexpr size_t window_data_at(int num_signals) {
  return whole_pages(sizeof(Doorbell) + static_cast<size_t>(num_signals) * sizeof(std::atomic<uint64_t>));
}

/// The size of the memory file that shm makes, to the byte.
constexpr size_t window_bytes(size_t num_bytes, int num_signals) { return window_data_at(num_signals) + whole_pages(num_bytes ? num_bytes : 1); }

}  // namespace turnout::transport
