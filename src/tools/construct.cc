#include "tools/construct.h"

#include <chrono>
#include <vector>

#include "tools/environment.h"
#include "tools/gpus.h"
#include "tools/shared_arena.h"

namespace turnout::tools {

BufferConfig construct_config(const Plan& plan, const BenchOptions& o, int num_ranks, Device device) {
  constexpr size_t kPage = 4096;
  BufferConfig c;
  apply_environment(c);
  c.num_experts = plan.spec.num_experts;
  c.hidden = plan.spec.hidden;
  c.dtype = plan.spec.dtype;
  c.max_tokens_per_rank = o.tokens;
  c.max_topk = plan.spec.topk;
  c.num_threads = o.num_threads;
  c.receive_bytes = kPage;
  c.device = device;
  const size_t least = required_bytes(c, num_ranks), arena = o.arena_mib << 20;
  if (least > arena) {
    throw InvalidArgument("--arena-mib " + std::to_string(o.arena_mib) + ": this shape needs " + std::to_string((least >> 20) + 1) +
                          " MiB for headers and staging alone");
  }
  c.receive_bytes += arena - least;
  return c;
}

ReportCase time_construct(Communicator& communicator, const Plan& plan, const BenchOptions& o, Device device) {
  using Clock = std::chrono::steady_clock;
  const BufferConfig config = construct_config(plan, o, communicator.num_ranks(), device);
  SharedArena arena(communicator, 0);
  std::string transport;
  const auto once = [&] {
    arena.barrier();
    const auto start = Clock::now();
    const Buffer buffer(communicator, config);
    const auto end = Clock::now();
    transport = transport_of(buffer, communicator);
    arena.barrier();  // nobody's arena goes while another rank still maps it
    return std::chrono::duration<double, std::micro>(end - start).count();
  };
  const double typical = arena.max(once());
  const int count = o.iterations > 0 ? o.iterations : static_cast<int>(std::clamp(o.seconds * 1e6 / std::max(typical, 1.0), 10.0, 200.0));
  std::vector<double> times;
  {
    Progress progress("construct", count, communicator.rank() == 0);
    for (int i = 0; i < count; ++i, progress.at(i)) times.push_back(once());
  }
  times = arena.max(times);
  ReportCase c;
  c.op = "construct";
  c.transport = transport;
  c.p50_us = quantile(times, 0.5);
  c.p99_us = quantile(times, 0.99);
  c.n_calls = count;
  c.total_bytes = static_cast<int64_t>(o.arena_mib << 20) * communicator.num_ranks();
  return c;
}

}  // namespace turnout::tools
