// The one portability macro: arithmetic that g++ and nvcc both compile.
#pragma once
#if defined(__CUDACC__)
#define TURNOUT_HOST_DEVICE __host__ __device__
#else
#define TURNOUT_HOST_DEVICE
#endif
