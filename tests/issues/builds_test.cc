// A libturnout_cuda.so was taken by its version alone, and a build's version is that of the builds before it: one from yesterday read the
// arguments of today at yesterday's places.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>

#include "transport/build_identity.h"
#include "transport/cuda.h"
#include "util/dynlib.h"

namespace turnout::transport::testing {
namespace {

/// Before anything asks for the environment, which is read once.
const bool is_set = setenv("TURNOUT_CUDA_LIBRARY", OTHER_BUILD, 1) == 0;

CudaTable own_table() {
  CudaTable table;
  table.built = TURNOUT_VERSION;
  table.headers = kSharedHeaders;
  table.layout = layout_digest();
  return table;
}

void expect_refused(const CudaTable& table, std::initializer_list<const char*> words) {
  const std::string why = mismatch_of(table, "/a/libturnout_cuda.so");
  for (const std::string word : words) EXPECT_NE(why.find(word), std::string::npos) << word << " in: " << why;
  EXPECT_NE(why.find("/a/libturnout_cuda.so and " + util::own_file() + " are of different builds"), std::string::npos) << why;
  EXPECT_NE(why.find("install both from one build"), std::string::npos) << why;
}

TEST(Builds, AnotherOnesLibraryIsNotUsedAndBothFilesAreNamed) {
  ASSERT_TRUE(is_set);
  EXPECT_EQ(cuda_table(), nullptr);
  EXPECT_EQ(num_cuda_devices(), 0);
  const std::string reason = cuda_reason();
  for (const std::string& word : {std::string(OTHER_BUILD), util::own_file(), std::string("0123456789abcdef"), std::string(kSharedHeaders)}) {
    EXPECT_NE(reason.find(word), std::string::npos) << word << " in: " << reason;
  }
  EXPECT_EQ(cuda_device_reason(0), reason);
}

TEST(Builds, TheSameBuildFits) {
  EXPECT_EQ(mismatch_of(own_table(), "/a/libturnout_cuda.so"), "");
  EXPECT_EQ(std::string(kSharedHeaders).size(), 16u);
}

TEST(Builds, EveryDifferenceIsSeen) {
  CudaTable table = own_table();
  table.built = "0.0.9";
  expect_refused(table, {"Turnout 0.0.9", "Turnout " TURNOUT_VERSION});
  table = own_table();
  table.headers = "fedcba9876543210";
  expect_refused(table, {"fedcba9876543210", kSharedHeaders});
  table = own_table();
  ++table.layout;
  expect_refused(table, {"layout"});
}

// Of a table of another kind nothing but the number is read.
TEST(Builds, ATableOfAnotherKindIsNotRead) {
  CudaTable table = own_table();
  table.version = CudaTable::kVersion - 1;
  table.headers = nullptr;
  expect_refused(table, {"table 2", "table 3"});
}

}  // namespace
}  // namespace turnout::transport::testing
