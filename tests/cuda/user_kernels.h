// Kernels as a user's program has them beside ours: slow producers, kernels that take multiprocessors and keep them. Asynchronous;
// they throw if the launch fails.
#pragma once
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace turnout::testing {

/// Loads all of them on the current device: a kernel that is loaded later might wait for ranks that wait for this one.
void load_user_kernels();

/// Runs for so long, on one thread.
void spin(cudaStream_t stream, std::chrono::nanoseconds time);

/// Copies words (4 bytes) by a kernel.
void copy_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes);

/// The same with programmatic dependent launch (sm_90 and newer; else like copy_words): the first lets what follows it start at once, and
/// copies when `late` has passed; the second starts while what is ahead of it still runs, and waits for that.
void produce_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes, std::chrono::nanoseconds late);
void consume_words(cudaStream_t stream, void* to, const void* from, size_t num_bytes);

/// Sets *flag (mapped host memory) to `value`.
void mark(cudaStream_t stream, uint32_t* flag, uint32_t value);

/// Takes `num_sms` multiprocessors whole, each counted in *started, until *stop is set or `most` is over. Both are mapped.
void occupy(cudaStream_t stream, int num_sms, uint32_t* started, const uint32_t* stop, std::chrono::nanoseconds most);

/// `num_sms` blocks, each on a multiprocessor of its own, that wait for each other: *met (mapped) becomes 1 if all of them ran at
/// once, 2 if they did not within `most`. `counter` is zeroed device memory.
void meet(cudaStream_t stream, int num_sms, uint32_t* counter, uint32_t* met, std::chrono::nanoseconds most);

/// Row i of `num_rows` rows of `num_words` words: word j becomes a hash of (i, j) whose halves are finite bf16 numbers.
void fill_rows(cudaStream_t stream, uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride_words);
/// Adds to *wrong (device memory) the words of row i that differ from those of row i * step + first of fill_rows.
void count_wrong_rows(cudaStream_t stream, const uint32_t* rows, int64_t num_rows, int64_t num_words, int64_t stride_words, int64_t first,
                      int64_t step, unsigned long long* wrong);

}  // namespace turnout::testing
