// The timed calls of a bench, pages warm, and the limit beside them: on a CPU what memcpy takes for the same bytes, on GPUs what a
// copy engine would take for those that the busiest rank sends.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/gpus.h"
#include "tools/limit.h"
#include "tools/place.h"
#include "tools/plan.h"
#include "tools/report.h"
#include "tools/shared_arena.h"
#include "turnout/buffer.h"

namespace turnout::tools {

class Timing {
 public:
  /// Collective; `plan`, `options` and `communicator` must outlive it. Throws: TransportError (memory).
  Timing(Communicator& communicator, const Plan& plan, const BenchOptions& options, Device device, const Gpus& gpus);

  // Collective.
  ReportCase dispatch();
  ReportCase combine();

  const std::string& transport() const { return transport_; }
  std::optional<double> link() const { return link_; }

 private:
  size_t rank() const { return static_cast<size_t>(communicator_.rank()); }
  /// Bytes of a row as it travels, without what lies beside it.
  size_t moved_bytes() const;
  /// Times of a call on all ranks, in microseconds, and of its limit if one is measured: half of its calls come before, half after.
  struct Times {
    std::vector<double> calls, limits;
  };
  template <class Call>
  Times timed(const char* label, const Call& call, const std::function<void()>& limit);
  template <class Call>
  std::vector<double> timed_on_host(const char* label, const Call& call, double share);
  std::vector<double> timed_on_gpu(const char* label, const std::function<void()>& call);
  int count_for(double typical_us, double share, int most) const;
  ReportCase new_case(const char* op, const Times& times, int64_t busiest_bytes) const;

  Communicator& communicator_;
  const Plan& plan_;
  const BenchOptions& o_;
  core::DispatchProblem problem_;
  Traffic traffic_;
  size_t row_bytes_;
  WarmMemory x_, out_;
  bool copies_limit_ = false;  ///< the limit is measured by copying, on the CPU
  std::unique_ptr<SharedArena> arena_;
  std::unique_ptr<Place> place_;
  std::unique_ptr<Buffer> buffer_;
  std::string transport_;
  std::optional<double> link_;  ///< GB/s
  DispatchArgs args_;
};

}  // namespace turnout::tools
