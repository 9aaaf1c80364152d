// A libturnout_cuda.so of another release is refused with both names, and nothing of it is called.
#include <gtest/gtest.h>

#include <cstdlib>

#include "transport/cuda.h"

namespace turnout::transport::testing {

// DeepEP#145, DeepEP#126, DeepEP#150: a library of another build was loaded, and the constructor crashed.
TEST(CudaOther, ALibraryOfAnotherReleaseIsRefused) {
  ASSERT_EQ(setenv("TURNOUT_CUDA_LIBRARY", OTHER_CUDA_LIBRARY, 1), 0);
  EXPECT_EQ(cuda_table(), nullptr);
  const std::string reason = cuda_reason();
  for (const char* part : {OTHER_CUDA_LIBRARY " and ", "are of different builds (Turnout 9.9.9, ", "install both from one build"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }
  EXPECT_EQ(num_cuda_devices(), 0);
}

}  // namespace turnout::transport::testing
