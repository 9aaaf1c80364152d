// Two processes on one GPU under NVIDIA's MPS, which gives each half of the multiprocessors: both run at once, with fewer than the GPU
// has. The test itself never starts the driver; it starts the daemon of MPS, with folders of its own, and ends it.
#include <cstdlib>
#include <filesystem>

#include "cuda/gpu_processes.h"
#include "cuda/replay.h"
#include "support/shell.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;
using support::answer_of;

/// The daemon, for processes that are started while this lives.
class Mps {
 public:
  Mps() {
    char name[] = "/tmp/turnout_mps.XXXXXX";
    folder_ = mkdtemp(name);
    for (const char* part : {"pipe", "log"}) std::filesystem::create_directory(folder_ + "/" + part);
    setenv("CUDA_MPS_PIPE_DIRECTORY", (folder_ + "/pipe").c_str(), 1);
    setenv("CUDA_MPS_LOG_DIRECTORY", (folder_ + "/log").c_str(), 1);
    setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", 1);
    const support::Answer there = answer_of("command -v nvidia-cuda-mps-control");
    if (there.status != 0) {
      reason_ = "there is no nvidia-cuda-mps-control";
      return;
    }
    const support::Answer started = answer_of("timeout 20 nvidia-cuda-mps-control -d 2>&1");
    runs_ = started.status == 0;
    reason_ = runs_ ? why_no_client() : "nvidia-cuda-mps-control -d: status " + std::to_string(started.status) + " " + started.text;
  }
  ~Mps() {
    if (runs_) answer_of("echo quit -t 5 | timeout 20 nvidia-cuda-mps-control 2>&1");
    for (const char* name : {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}) unsetenv(name);
    std::filesystem::remove_all(folder_);
  }
  Mps(const Mps&) = delete;
  Mps& operator=(const Mps&) = delete;
  /// Why no process can be a client here; empty if one can.
  const std::string& reason() const { return reason_; }

 private:
  /// Tried by a process that ends: a driver that could not be started once stays so.
  std::string why_no_client() const {
    int words[2];
    if (pipe(words) != 0) return "no pipe";
    const pid_t child = fork();
    if (child == 0) {
      const cudaError_t e = cudaFree(nullptr);
      const std::string text = e == cudaSuccess ? "" : std::string("MPS refuses clients: ") + cudaGetErrorString(e);
      const bool written = write(words[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
      _exit(written ? 0 : 1);
    }
    close(words[1]);
    std::string text(400, '\0');
    const ssize_t n = read(words[0], text.data(), text.size());
    close(words[0]);
    int status = 0;
    waitpid(child, &status, 0);
    text.resize(n > 0 ? static_cast<size_t>(n) : 0);
    return text.empty() && status != 0 ? "a first client of MPS crashed" : text;
  }
  std::string folder_, reason_;
  bool runs_ = false;
};

TEST(CudaMps, TwoProcessesEachWithHalfOfTheGpu) {
  if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  const Mps mps;
  if (!mps.reason().empty()) GTEST_SKIP() << mps.reason();
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    RandomLimits limits;
    limits.num_ranks = 2;
    limits.several_nodes = false;
    std::deque<Expected> problems;
    for (uint64_t seed = 1; seed <= 12; ++seed) problems.emplace_back(seed + 1, random_problem(seed, limits));
    ReplayShape shape;
    shape.mode = mode;
    shape.max_tokens = 512;
    const Routings large(3, 2, shape, 1);
    Family family(2, as_rank(2, [&](Communicator& comm) {
                    int sms = 0;
                    cuda_ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
                    if (comm.rank() == 0) saw("%s: a process sees %d multiprocessors", std::string(name(mode)).c_str(), sms);
                    RunChoices run;
                    run.mode = mode;
                    run.receive_bytes = size_t{64} << 20;
                    run.timeout = 8s;
                    run.place = [](int) { return std::make_unique<CudaPlace>(0); };
                    for (size_t i = 0; i < problems.size(); ++i) {
                      SCOPED_TRACE("seed " + std::to_string(i + 1) + " rank " + std::to_string(comm.rank()));
                      run.async = i % 3 == 1;
                      run.repeats = i % 3 == 2 ? 3 : 1;
                      play_rank(comm, problems[i], run);
                      if (::testing::Test::HasFailure()) return;
                    }
                    run.async = false;
                    run.repeats = 10;
                    run.receive_bytes = size_t{512} << 20;
                    play_rank(comm, large.variant(0), run);
                  }));
    family.expect_success();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace turnout::testing
