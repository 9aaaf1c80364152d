// libturnout_cuda.so loads on every machine, and says why where there is nothing to drive.
#include "transport/cuda.h"
#include "transport/device/gpu.h"
#include "transport/inproc/inproc.h"
#include "transport/ranks.h"

namespace turnout::transport::testing {

TEST(CudaLibrary, LoadsWithOrWithoutADriver) {
  ASSERT_NE(cuda_table(), nullptr) << cuda_reason();
  EXPECT_EQ(cuda_table()->version, CudaTable::kVersion);
  if (cuda_reason().empty()) {
    EXPECT_GT(num_cuda_devices(), 0);
    EXPECT_NE(describe_cuda_device(0).find("sm_"), std::string::npos);
  } else {
    EXPECT_EQ(num_cuda_devices(), 0);
    EXPECT_EQ(describe_cuda_device(0), cuda_reason());
  }
}

TEST(CudaLibrary, ItsErrorsAreOurs) {
  ASSERT_NE(cuda_table(), nullptr) << cuda_reason();
  EXPECT_THROW(cuda_table()->describe(1000), TransportError);
}

TEST(CudaLibrary, AnAbsentDeviceHasAReasonOnEveryRank) {
  run_ranks(3, [](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    EXPECT_NE(cuda_device_reason(1000), "");
    try {
      open_device_window(bootstrap, *host, "auto", 1000, 4096);
      ADD_FAILURE() << "opened";
    } catch (const TransportError& error) {
      EXPECT_EQ(error.what(), cuda_device_reason(1000));
    }
  });
}

TEST(CudaLibrary, CodeRunsOnArchitecturesOfItsKind) {
  using device::has_code;
  const std::string built = "80-real 90-real 100-real";
  EXPECT_TRUE(has_code(built, 8, 0) && has_code(built, 8, 9) && has_code(built, 9, 0) && has_code(built, 10, 0) && has_code(built, 10, 3));
  EXPECT_FALSE(has_code(built, 7, 5) || has_code(built, 12, 0));
  EXPECT_TRUE(has_code("90a-real", 9, 0));
  EXPECT_FALSE(has_code("100a-real", 10, 3));
  EXPECT_TRUE(has_code("100f-real", 10, 3));
  EXPECT_TRUE(has_code("80-real 90-virtual", 12, 0));  // compiled by the driver
  EXPECT_TRUE(has_code("90", 12, 0));
  EXPECT_FALSE(has_code("90-real", 8, 0) || has_code("", 9, 0));
  EXPECT_TRUE(has_code("native", 9, 0));
}

TEST(CudaLibrary, AnArchitectureWithoutCodeNamesTheFlag) {
  EXPECT_EQ(device::code_reason("80-real 90-real", 3, 9, 0), "");
  const std::string reason = device::code_reason("80-real 90-real", 3, 12, 0);
  for (const char* part : {"device 3 is sm_120", "80-real 90-real", "-DCMAKE_CUDA_ARCHITECTURES=120", "TORCH_CUDA_ARCH_LIST=12.0"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }
}

TEST(CudaLibrary, AGpuTravelsInWords) {
  device::RankGpu gpu{"0123", "NVIDIA H200 of a name with spaces", "0000:1a:00", "token-1", 3, true, false, size_t{2} << 20};
  const device::RankGpu back = device::unpack(device::pack(gpu));
  EXPECT_EQ(device::pack(back), device::pack(gpu));
  EXPECT_EQ(back.name, gpu.name);
  EXPECT_EQ(back.granularity, gpu.granularity);
  EXPECT_TRUE(back.has_vmm && !back.has_fd);
  EXPECT_THROW(device::unpack("0123\nname"), TransportError);
}

}  // namespace turnout::transport::testing
