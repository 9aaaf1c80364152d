// One measured shape on one rank: its tensors in the memory of a GPU, made from a hash so that every rank knows everybody's.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "turnout/turnout.hpp"

namespace turnout::bench {

void cuda_ok(cudaError_t e, const char* what);

struct Shape {
  std::string name;
  int64_t tokens = 4096, hidden = 7168;
  int topk = 8, experts = 256;
  Mode mode = Mode::throughput;
  Layout layout = Layout::rank_major;
  bool fp8_rows = false;  ///< x is fp8 with fp32 scales as a side array
  Quantize quantize = Quantize::none;
  int alignment = 128;
  bool combine = false;
  bool both = false;  ///< a dispatch and the combine of what it brought, as one call
  int num_sms = 0;
  ResultKind result = ResultKind::automatic;
  int graph_calls = 0;  ///< calls in one captured graph; 0: eager
  std::string routing = "uniform";
  double skew_us = 0;      ///< rank 0 is late by so much
  bool cold = false;       ///< before each call other data passes through L2
  bool by_stores = false;  ///< its limit is what the multiprocessors of its rank store, kStoreGBps each
};

/// What one multiprocessor stores of rows that it lays out.
constexpr double kStoreGBps = 50;

/// The table of the GPU's numbers, and what is printed beside it.
std::vector<Shape> shapes();

/// Copy engine, both ways at once, between the first two GPUs. GB/s per direction; 0 with one GPU.
double link_GBps();

/// A kernel of one thread that takes so long, before what is issued next on `stream`.
void delay(double us, cudaStream_t stream);

/// A value in [-1, 1) that depends on all its numbers.
float hash_value(uint64_t seed, uint64_t row, uint64_t column);

/// Rows that one rank contributes: bits of bf16 or fp8, [tokens, hidden].
std::vector<uint16_t> bf16_rows(uint64_t seed, int64_t rows, int64_t hidden);

/// Device memory of the bench: freed when it dies.
class DeviceArray {
 public:
  explicit DeviceArray(size_t num_bytes);
  DeviceArray(const void* host, size_t num_bytes);
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// What all ranks send, as each of them knows it: ids and weights by rank.
struct Problem {
  Shape shape;
  int num_ranks = 1;
  uint64_t seed = 1;
  std::vector<std::vector<int64_t>> ids;  ///< [rank][T * K]
  std::vector<std::vector<float>> weights;
};
Problem make_problem(const Shape& shape, int num_ranks, uint64_t seed);

/// (token, destination) rows that leave a rank, all ranks together, and those that stay; (token, expert) pairs of the rank that gets most.
struct Traffic {
  int64_t remote_rows = 0, local_rows = 0, most_remote_to_one = 0, most_pairs = 0;
};
Traffic traffic_of(const Problem& p);
/// Capacity of the layout that loses nothing: rows of the busiest rank, or of the busiest expert.
int64_t capacity_of(const Problem& p);

/// Compares sampled rows and sums of a call with what the problem says. Empty: all equal. Downloads what it looks at.
std::string check_dispatch(const Problem& p, int rank, const DispatchResult& result, cudaStream_t stream);
std::string check_combine(const Problem& p, int rank, const CombineResult& result, cudaStream_t stream);
/// Rows of y for a combine: row r of rank `rank` is hash_value(seed + 1000 + rank, r, column).
std::vector<uint16_t> y_rows(const Problem& p, int rank, int64_t rows);

}  // namespace turnout::bench
