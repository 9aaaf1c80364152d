// Row kernels of each instruction set beside memcpy, in GB/s of bytes read and written, over rows that fit the second-level
// cache and over rows that do not fit any. One thread, warm pages, the best of several passes.
#include "engine/cpu/rows.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine/cpu/page_pool.h"
#include "engine/cpu/rows_isa.h"

namespace {

using namespace turnout;
using engine::Isa;
using engine::RowKernels;
using engine::RowRef;

struct Options {
  int64_t hidden = 7168;
  int passes = 7;
};

/// Rows of any type one after the other, with room for scales.
class Rows {
 public:
  Rows(engine::PagePool& pool, size_t num_rows, size_t row_bytes)
      : stride_((row_bytes + 127) / 128 * 128), data_(static_cast<std::byte*>(pool.allocate(stride_ * num_rows))) {
    for (size_t i = 0; i < stride_ * num_rows; ++i) data_[i] = static_cast<std::byte>(i % 3 == 1 ? 0x3F : i & 0x3F);
  }
  std::byte* row(size_t i) const { return data_ + i * stride_; }

 private:
  size_t stride_;
  std::byte* data_;
};

template <class F>
double best_seconds(int passes, F pass) {
  double best = 1e9;
  for (int i = 0; i < passes; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    pass();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

struct Sum {
  const char* name;
  int num_terms;
  DType in, out;
  bool weighted;
};

constexpr Sum kSums[] = {
    {"sum 1 bf16 -> bf16", 1, DType::bf16, DType::bf16, false},         {"sum 2 bf16 -> bf16", 2, DType::bf16, DType::bf16, false},
    {"sum 2 bf16 -> bf16 weighted", 2, DType::bf16, DType::bf16, true}, {"sum 4 bf16 -> bf16", 4, DType::bf16, DType::bf16, false},
    {"sum 4 bf16 -> bf16 weighted", 4, DType::bf16, DType::bf16, true}, {"sum 8 bf16 -> bf16", 8, DType::bf16, DType::bf16, false},
    {"sum 8 bf16 -> bf16 weighted", 8, DType::bf16, DType::bf16, true}, {"sum 4 bf16 -> fp32", 4, DType::bf16, DType::fp32, false},
    {"sum 2 fp32 -> bf16", 2, DType::fp32, DType::bf16, false},         {"sum 4 bf16 -> fp8", 4, DType::bf16, DType::fp8_e4m3, false},
    {"sum 2 fp8 -> bf16", 2, DType::fp8_e4m3, DType::bf16, false},      {"sum 2 fp16 -> fp16", 2, DType::fp16, DType::fp16, false},
    {"sum 2 fp32 -> fp32", 2, DType::fp32, DType::fp32, false},         {"sum 2 fp64 -> fp64", 2, DType::fp64, DType::fp64, false},
};

class Bench {
 public:
  Bench(const Options& options, size_t num_bytes) : options_(options), num_bytes_(num_bytes) {
    scales_.assign(static_cast<size_t>(options.hidden / 128 + 1), 0.5f);
  }

  void copies(const std::vector<Isa>& isas) {
    const size_t row_bytes = static_cast<size_t>(options_.hidden) * 2, n = std::max<size_t>(num_bytes_ / row_bytes / 2, 1);
    const Rows from(pool_, n, row_bytes), to(pool_, n, row_bytes);
    const auto measure = [&](const char* isa, const char* what, auto copy) {
      print(isa, what, 2 * n * row_bytes, best_seconds(options_.passes, [&] {
              for (size_t i = 0; i < n; ++i) copy(to.row(i), from.row(i), row_bytes);
            }));
    };
    measure("", "memcpy", [](void* dst, const void* src, size_t bytes) { std::memcpy(dst, src, bytes); });
    for (Isa isa : isas) {
      measure(engine::name(isa).data(), "copy_row", engine::row_kernels(isa).copy_row);
      measure(engine::name(isa).data(), "copy_row_streaming", engine::row_kernels(isa).copy_row_streaming);
    }
  }

  void quantise(Isa isa, DType in) {
    const size_t hidden = static_cast<size_t>(options_.hidden), in_bytes = hidden * size_of(in), moved = in_bytes + hidden;
    const size_t n = std::max<size_t>(num_bytes_ / moved, 1);
    const Rows from(pool_, n, in_bytes), to(pool_, n, hidden);
    const std::string what = "quantize_row " + std::string(name(in));
    print(engine::name(isa).data(), what.c_str(), n * moved, best_seconds(options_.passes, [&] {
            for (size_t i = 0; i < n; ++i) {
              engine::row_kernels(isa).quantize_row(from.row(i), in, options_.hidden, reinterpret_cast<uint8_t*>(to.row(i)), scales_.data(), nullptr);
            }
          }));
  }

  void sum(Isa isa, const Sum& s) {
    const size_t hidden = static_cast<size_t>(options_.hidden), terms = static_cast<size_t>(s.num_terms);
    const size_t in_bytes = hidden * size_of(s.in), out_bytes = hidden * size_of(s.out), moved = terms * in_bytes + out_bytes;
    const size_t n = std::max<size_t>(num_bytes_ / moved, 1);
    const Rows from(pool_, n * terms, in_bytes), to(pool_, n, out_bytes);
    const std::vector<float> weights(terms, 0.7f);
    std::vector<RowRef> rows(terms);
    print(engine::name(isa).data(), s.name, n * moved, best_seconds(options_.passes, [&] {
            for (size_t i = 0; i < n; ++i) {
              for (size_t t = 0; t < terms; ++t) rows[t] = {from.row(i * terms + t), s.in == DType::fp8_e4m3 ? scales_.data() : nullptr};
              engine::row_kernels(isa).sum_rows(rows.data(), s.weighted ? weights.data() : nullptr, s.num_terms, s.in, options_.hidden, to.row(i),
                                                s.out == DType::fp8_e4m3 ? scales_.data() : nullptr, s.out, s.in == DType::fp64);
            }
          }));
  }

 private:
  void print(const char* isa, const char* what, size_t bytes, double seconds) {
    const double rate = static_cast<double>(bytes) / seconds / 1e9;
    if (memcpy_rate_ == 0) memcpy_rate_ = rate;
    std::printf("%-7s %-30s %7.1f GB/s  %5.2f of memcpy\n", isa, what, rate, rate / memcpy_rate_);
    std::fflush(stdout);
  }

  const Options options_;
  const size_t num_bytes_;
  double memcpy_rate_ = 0;
  engine::PagePool pool_{0};
  std::vector<float> scales_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (argc > 1) options.hidden = std::atoll(argv[1]);
  if (options.hidden < 1) {
    std::fprintf(stderr, "usage: rows_bench [hidden]: the width of a row, at least 1; came \"%s\"\n", argv[1]);
    return 2;
  }
  std::vector<Isa> isas;
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (engine::has_isa(isa)) isas.push_back(isa);
  }
  for (size_t bytes : {size_t{512} << 10, size_t{128} << 20}) {
    std::printf("hidden %lld, rows of %zu KiB in all\n", static_cast<long long>(options.hidden), bytes >> 10);
    Bench bench(options, bytes);
    bench.copies(isas);
    for (Isa isa : isas) {
      for (DType in : {DType::bf16, DType::fp32}) bench.quantise(isa, in);
      for (const Sum& sum : kSums) bench.sum(isa, sum);
    }
  }
}
