// Kernels of tests, behind plain functions. Each returns when the kernel has ended, and throws if it failed.
#pragma once
#include <cstddef>
#include <cstdint>

namespace turnout::testing {

/// Stores words `seed + i` from a kernel on the current device.
void store_words(std::byte* to, size_t num_words, uint64_t seed);
/// How many of the words differ from `seed + i`, counted by a kernel on the current device.
uint64_t wrong_words(const std::byte* at, size_t num_words, uint64_t seed);
/// How many words are not zero.
uint64_t nonzero_words(const std::byte* at, size_t num_words);

}  // namespace turnout::testing
