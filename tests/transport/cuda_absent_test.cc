// Without libturnout_cuda.so there is a reason, the same for every rank.
#include <set>

#include "ranks.h"
#include "transport/cuda.h"
#include "transport/inproc/inproc.h"
#include "util/dynlib.h"

namespace turnout::transport::testing {

namespace {
/// Before anything asks for the environment, which is read once.
const bool is_set = setenv("TURNOUT_CUDA_LIBRARY", "/nowhere/libturnout_cuda.so", 1) == 0;
}  // namespace

TEST(CudaAbsent, CallersGetAReason) {
  ASSERT_TRUE(is_set);
  EXPECT_EQ(cuda_table(), nullptr);
  EXPECT_EQ(num_cuda_devices(), 0);
  const std::string reason = cuda_reason();
  for (const char* part : {"/nowhere/libturnout_cuda.so", "TURNOUT_CUDA=OFF", "TURNOUT_CUDA_LIBRARY"}) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason;
  }
  EXPECT_EQ(describe_cuda_device(0), reason);
  EXPECT_EQ(cuda_device_reason(0), reason);
}

TEST(CudaAbsent, ToolsGetTheReason) {
  const DeviceCopy copies[] = {{0, 1}, {1, DeviceCopy::kHost}};
  for (const std::function<void()>& call : {std::function<void()>([] { num_cuda_sms(0); }), std::function<void()>([] { open_device_stream(0); }),
                                            std::function<void()>([&] { copy_GBps(copies); })}) {
    try {
      call();
      ADD_FAILURE() << "done";
    } catch (const TransportError& error) {
      EXPECT_EQ(error.what(), cuda_reason());
    }
  }
}

TEST(CudaAbsent, OpeningAWindowFailsAlikeOnAllRanks) {
  run_ranks(3, [](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    try {
      open_device_window(bootstrap, *host, "auto", 0, 4096);
      ADD_FAILURE() << "opened";
    } catch (const TransportError& error) {
      EXPECT_EQ(error.what(), cuda_reason());
    }
  });
}

TEST(Dynlib, LooksBesideTheProgramAndNamesEveryPlace) {
  const std::string folder = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  try {
    const util::Dynlib none("libturnout_none.so");
    ADD_FAILURE() << none.path();
  } catch (const TransportError& error) {
    const std::string words = error.what();
    EXPECT_NE(words.find(folder + "/libturnout_none.so"), std::string::npos) << words;
    std::set<std::string> places;
    for (size_t at = words.find("not at "); at != std::string::npos; at = words.find("not at ", at + 1)) {
      EXPECT_TRUE(places.insert(words.substr(at, words.find(';', at) - at)).second) << "twice: " << words;
    }
    EXPECT_GE(places.size(), 2u) << words;
  }
  const util::Dynlib found("libc.so.6");
  EXPECT_NE(found.symbol("printf"), nullptr);
  EXPECT_EQ(found.symbol("turnout_none"), nullptr);
}

}  // namespace turnout::transport::testing
