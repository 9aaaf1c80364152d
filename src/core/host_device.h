// The one portability macro: arithmetic that g++ and nvcc both compile.
#pragma once
#if defined(__CUDACC__)
#define TURNOUT_HOST_DEVICE __host__ __device__
#elif defined(TURNOUT_ISA_UNIT)
// Units compiled for a wider instruction set than the rest keep their own copies: the linker must not pick theirs for all.
#define TURNOUT_HOST_DEVICE static
#else
#define TURNOUT_HOST_DEVICE
#endif
