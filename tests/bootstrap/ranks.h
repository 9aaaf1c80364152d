// Ranks as threads for the tests of this folder.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "turnout/bootstrap.h"

namespace turnout::testing_ranks {

inline void run(int num_ranks, const std::function<void(int)>& body) {
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back(body, rank);
}
inline std::span<const std::byte> bytes(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }
inline std::string text(const std::vector<std::byte>& data) { return {reinterpret_cast<const char*>(data.data()), data.size()}; }

}  // namespace turnout::testing_ranks
