// Chooses the row kernels, and what no instruction set makes faster.
#include "engine/cpu/rows.h"

#include <cstring>
#include <string>

#include "core/dtype.h"
#include "engine/cpu/rows_isa.h"
#include "turnout/error.h"
#include "util/env.h"

namespace turnout::engine {

std::string_view name(Isa isa) {
  switch (isa) {
    case Isa::avx2: return "avx2";
    case Isa::avx512: return "avx512";
    default: return "plain";
  }
}

Isa best_isa() {
  const std::string& asked = util::env().cpu_isa;
  for (Isa isa : {Isa::avx512, Isa::avx2, Isa::plain}) {
    if (asked == name(isa) && !has_isa(isa)) {
      throw InvalidArgument("TURNOUT_CPU_ISA=" + asked + ": this processor does not have it; auto takes the best that it has");
    }
    const bool wanted = asked.empty() || asked == "auto" || asked == name(isa);
    if (wanted && has_isa(isa)) return isa;
  }
  return Isa::plain;
}

const RowKernels& row_kernels(Isa isa) {
  switch (isa) {
    case Isa::avx2: return row_kernels_avx2();
    case Isa::avx512: return row_kernels_avx512();
    default: return row_kernels_plain();
  }
}

namespace {

template <class T>
void fill(void* out, T value, int64_t n) {
  auto* bytes = static_cast<std::byte*>(out);
  for (int64_t i = 0; i < n; ++i) std::memcpy(bytes + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

}  // namespace

void fill_failed(void* out, DType dtype, int64_t num_elements) {
  switch (dtype) {
    case DType::fp8_e4m3: return fill(out, core::kNanE4m3, num_elements);
    case DType::fp8_e5m2: return fill(out, core::kNanE5m2, num_elements);
    case DType::ue8m0: return fill(out, core::kNanUe8m0, num_elements);
    case DType::fp16: return fill(out, core::kNanFp16, num_elements);
    case DType::bf16: return fill(out, core::kNanBf16, num_elements);
    case DType::fp32: return fill(out, core::kNanFp32, num_elements);
    case DType::fp64: return fill(out, core::kNanFp64, num_elements);
    default: return fill(out, uint8_t{0}, num_elements * static_cast<int64_t>(size_of(dtype)));
  }
}

}  // namespace turnout::engine
