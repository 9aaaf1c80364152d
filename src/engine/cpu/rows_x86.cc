// Which instruction sets this processor and its operating system offer.
#include <cpuid.h>

#include "engine/cpu/rows_isa.h"

namespace turnout::engine {

bool has_isa(Isa isa) {
  if (isa == Isa::plain) return true;
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  if (!f16c || !__builtin_cpu_supports("avx2")) return false;
  if (isa == Isa::avx2) return true;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

}  // namespace turnout::engine
