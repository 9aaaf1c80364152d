// Ranks that share a GPU in one process: what the host of one does, however it does it, never waits for a kernel of another that waits
// for this very rank.
#include <future>
#include <optional>

#include "cuda/gpu_test.h"
#include "cuda/replay.h"
#include "transport/device_stream.h"

namespace turnout::testing {
namespace {

using namespace std::chrono_literals;

constexpr size_t kLarge = size_t{3} << 20;  ///< a copy of so much goes through memory of the driver

TensorView bytes_of(const std::vector<std::byte>& bytes) { return TensorView::dense(bytes.data(), DType::u8, {static_cast<int64_t>(bytes.size())}); }

/// A rank with a Buffer that was used and one that is about to be.
class Rank {
 public:
  Rank(Communicator& comm, const Routings& routings, const RunChoices& run, std::unique_ptr<CudaPlace> place)
      : e_(routings.variant(0)), at_(static_cast<size_t>(comm.rank())), place_(std::move(place)), arguments_(e_.p, comm.rank(), run) {
    BufferConfig config = config_for({&routings}, run, place_->device());
    config.receive_bytes = size_t{64} << 20;
    old_ = std::make_unique<Buffer>(comm, config);
    buffer_ = std::make_unique<Buffer>(comm, config);
    arguments_.move_to(*place_);
    DispatchArgs args = arguments_.dispatch;
    args.result = ResultKind::fresh;
    kept_ = old_->dispatch(args);
    place_->finish();
    old_->check();
  }

  void issue() { pending_ = buffer_->dispatch_async(arguments_.dispatch); }

  /// The rank whose kernel waits. It frees memory behind the kernel, and asks for a copy that comes after it.
  void leave_things_behind() {
    const std::vector<std::byte> large(kLarge);
    const TensorView freed = place_->put(bytes_of(large)), read = place_->put(bytes_of(large));
    issue();
    place_->give_back(freed);
    reader_ = std::async(std::launch::async, [this, read] { (void)place_->get(read); });
  }

  /// The rank that all wait for, before it comes.
  void do_everything() {
    kept_ = {};
    old_.reset();
    const std::vector<std::byte> large(kLarge);
    for (int i = 0; i < 4; ++i) (void)place_->get(place_->put(bytes_of(large)));
    {
      const std::unique_ptr<transport::DeviceStream> stream = transport::open_device_stream(place_->device().index);
      std::vector<std::byte> back(kLarge);
      std::byte* data = stream->allocate(kLarge);
      stream->upload(data, large.data(), kLarge);
      stream->download(back.data(), data, kLarge);
      stream->deallocate(data);
    }
    buffer_->check();
    const auto other = std::make_unique<CudaPlace>(place_->device().index);
    (void)other->put(bytes_of(large));
  }

  void finish() {
    if (reader_.valid()) reader_.get();
    const DispatchResult result = pending_->wait();
    place_->finish();
    buffer_->check();
    expect_dispatch(result, e_.received[at_], e_.p.dispatch, *place_);
  }

 private:
  const Expected& e_;
  const size_t at_;
  const std::unique_ptr<CudaPlace> place_;
  RankArguments arguments_;
  std::unique_ptr<Buffer> old_, buffer_;
  DispatchResult kept_;
  std::optional<PendingDispatch> pending_;
  std::future<void> reader_;  ///< waits for its end when it dies, and throws what went wrong
};

class Waits : public GpuTest {};

TEST_P(Waits, ARankComesThoughAllOthersWaitForIt) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (Receive receive : {Receive::deferred, Receive::resident}) {
      SCOPED_TRACE(std::string(name(mode)) + (receive == Receive::deferred ? " deferred" : " resident"));
      ReplayShape shape;
      shape.mode = mode;
      const Routings routings(7, num_ranks(), shape, 1);
      RunChoices run;
      run.mode = mode;
      run.receive = receive;
      run.timeout = 4s;
      run_virtual_ranks(num_ranks(), [&](Communicator& comm) {
        Rank rank(comm, routings, run, GetParam().place_of(comm.rank()));
        comm.barrier();
        const bool is_last = comm.rank() == num_ranks() - 1;
        if (!is_last) rank.leave_things_behind();
        comm.barrier();
        if (is_last) {
          rank.do_everything();
          rank.issue();
        }
        rank.finish();
        comm.barrier();
      });
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, Waits, ::testing::Values(Placement{2, 1}, Placement{4, 1}, Placement{8, 1}, Placement{5, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
