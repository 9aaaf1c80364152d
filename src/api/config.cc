// BufferConfig: its checks and the memory it costs.
#include "turnout/config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "api/layout.h"
#include "core/routing.h"
#include "engine/cpu/header.h"
#include "engine/cpu/row_format.h"
#include "engine/cuda/sizes.h"
#include "transport/window_bytes.h"
#include "util/env.h"

namespace turnout {
inline namespace v0 {

namespace {

constexpr int kMostRanks = 1 << 24;

template <class Number>
void require(bool good, const std::string& field, Number value, const std::string& wanted) {
  if (!good) throw InvalidArgument("BufferConfig: " + field + " is " + std::to_string(value) + ", but must be " + wanted);
}

/// Clocks count nanoseconds in 64 bits: what is meant to be for ever would be over at once.
void require_time(const std::string& field, std::chrono::milliseconds time) {
  constexpr int64_t kYear = int64_t{365} * 24 * 3600 * 1000;
  require(time.count() > 0 && time.count() <= kYear, field, time.count(), "1 to " + std::to_string(kYear) + ", a year");
}

}  // namespace

void BufferConfig::validate(int num_ranks) const {
  require(num_ranks >= 1 && num_ranks <= kMostRanks, "num_ranks", num_ranks, "1 to " + std::to_string(kMostRanks));
  require(num_experts >= 1 && num_experts <= (1 << 24), "num_experts", num_experts, "1 to 16777216");
  require(hidden >= 1 && hidden <= (int64_t{1} << 24), "hidden", hidden, "1 to 16777216");
  require(dtype <= DType::fp64, "dtype", static_cast<int>(dtype), "0 to " + std::to_string(static_cast<int>(DType::fp64)));
  require(max_tokens_per_rank >= 0, "max_tokens_per_rank", max_tokens_per_rank, "0 or more");
  require(max_tokens_per_rank < INT32_MAX / num_ranks, "max_tokens_per_rank", max_tokens_per_rank,
          "below 2^31 / " + std::to_string(num_ranks) + " ranks");
  require(max_topk >= 1 && max_topk <= kMaxTopk, "max_topk", max_topk, "1 to " + std::to_string(kMaxTopk));
  require(max_side_bytes <= (size_t{1} << 24), "max_side_bytes", max_side_bytes, "at most 16777216");
  require(num_lanes >= 1 && num_lanes <= 64, "num_lanes", num_lanes, "1 to 64");
  require(max_outstanding >= 1 && max_outstanding <= 64, "max_outstanding", max_outstanding, "1 to 64");
  // So that sums of sizes fit in 64 bits; what memory there is the transport finds out.
  constexpr size_t kMostBytes = size_t{1} << 46;
  require(receive_bytes <= kMostBytes, "receive_bytes", receive_bytes, "at most 2^46");
  require(staging_bytes <= kMostBytes, "staging_bytes", staging_bytes, "at most 2^46");
  require(num_threads >= 1 && num_threads <= 256, "num_threads", num_threads, "1 to 256");
  require(device.kind == DeviceKind::cpu || device.kind == DeviceKind::cuda, "device.kind", static_cast<int>(device.kind), "cpu (0) or cuda (1)");
  if (device.kind == DeviceKind::cpu) require(device.index == 0, "device.index", device.index, "0, since the device is the CPU");
  else require(device.index >= 0, "device.index", device.index, "0 or more, the number of a GPU of this process");
  if (device.kind == DeviceKind::cuda) {
    require(num_ranks <= engine::cuda::kMaxRanks, "num_ranks", num_ranks, "at most " + std::to_string(engine::cuda::kMaxRanks) + " on GPUs");
  }
  require_time("timeouts.timeout (ms)", timeouts.timeout);
  require_time("timeouts.busy_timeout (ms)", timeouts.busy_timeout);
  require_time("timeouts.report_every (ms)", timeouts.report_every);
  if (!expert_to_rank.empty()) {
    require(static_cast<int>(expert_to_rank.size()) == num_experts, "expert_to_rank.size()", static_cast<int64_t>(expert_to_rank.size()),
            "num_experts = " + std::to_string(num_experts));
    core::ExpertMap::of(expert_to_rank, num_ranks);
  }
  if (!replica_of.empty()) {
    require(static_cast<int>(replica_of.size()) == num_experts, "replica_of.size()", static_cast<int64_t>(replica_of.size()),
            "num_experts = " + std::to_string(num_experts));
    for (size_t e = 0; e < replica_of.size(); ++e) {
      require(replica_of[e] >= 0 && replica_of[e] < num_experts, "replica_of[" + std::to_string(e) + "]", replica_of[e],
              "a logical expert, 0 to " + std::to_string(num_experts - 1));
    }
  }
}

size_t required_bytes(const BufferConfig& config, int num_ranks) {
  config.validate(num_ranks);
  if (config.device.kind == DeviceKind::cuda) return engine::cuda::Arena::of(engine::cuda::arena_shape(config, num_ranks)).num_bytes;
  return api::arena_bytes(api::arena_of(config, num_ranks));
}

}  // namespace v0

namespace api {

namespace {

/// Rows that a rank receives from balanced routing in the largest layout, which has one for each expert of a token; with some to
/// spare, since experts are chosen by chance. Never more than all experts of all tokens.
int64_t expected_rows(const BufferConfig& config, int num_ranks) {
  const double rows = static_cast<double>(config.max_tokens_per_rank) * config.max_topk;
  return static_cast<int64_t>(std::ceil(std::min(rows * num_ranks, rows * 9 / 8 + 4 * std::sqrt(rows))));
}

/// Results that may be held at once: of the calls under way, and one of each further lane.
size_t default_receive_bytes(const BufferConfig& config, int num_ranks) {
  engine::RowFormat format;
  format.x_bytes = static_cast<size_t>(config.hidden) * size_of(config.dtype);
  format.scale_bytes = (static_cast<size_t>(config.hidden) + 127) / 128 * 4;
  if (config.max_side_bytes > 0) format.side_bytes.push_back(config.max_side_bytes);
  format.idx_bytes = format.weight_bytes = static_cast<size_t>(config.max_topk) * 4;
  format.derive();
  const auto results = static_cast<size_t>(std::max(2, config.max_outstanding) + config.num_lanes - 1);
  return results * (format.block(expected_rows(config, num_ranks), true).num_bytes + 4096);
}

/// In floating point, which does not wrap: what no address space holds is refused before it is laid out.
void check_size(const core::BufferShape& s) {
  constexpr double kMostBytes = 0x1p46, kMostRings = 0x1p27;
  const double rings = static_cast<double>(s.num_lanes) * s.depth * s.num_ranks;
  const double each = static_cast<double>(s.header_bytes) + static_cast<double>(std::max(s.staging_bytes, s.least_staging_bytes));
  const double bytes = rings * each + static_cast<double>(s.receive_bytes);
  if (rings <= kMostRings && bytes <= kMostBytes) return;
  throw InvalidArgument("BufferConfig: needs " + std::to_string(std::llround(std::min(bytes, 9e18))) +
                        " bytes of symmetric memory per rank, but at most 2^46 can be had: receive_bytes is " + std::to_string(s.receive_bytes) +
                        ", and num_lanes x (max_outstanding + 1) x ranks = " + std::to_string(std::llround(rings)) +
                        " (at most 2^27) staging rings take " + std::to_string(std::llround(std::min(each, 9e18))) + " bytes each");
}

}  // namespace

size_t staging_bytes_of(const BufferConfig& config) {
  return config.staging_bytes ? config.staging_bytes : static_cast<size_t>(util::env().staging_bytes.value_or(0));
}

size_t arena_bytes(const core::BufferLayout& layout) { return transport::window_bytes(layout.num_bytes, layout.num_signals()); }

core::BufferLayout arena_of(const BufferConfig& config, int num_ranks) {
  core::BufferShape shape;
  shape.num_ranks = num_ranks;
  shape.num_lanes = config.num_lanes;
  shape.depth = config.max_outstanding + 1;
  // Maps may change between calls, and one of them may give a rank every expert.
  shape.header_bytes = engine::header_bytes(num_ranks, config.num_experts);
  const size_t record = engine::max_record_bytes(config.hidden, config.dtype, config.max_topk, config.max_side_bytes);
  const size_t row = static_cast<size_t>(config.hidden) * size_of(config.dtype) + 256;
  shape.least_staging_bytes = std::max(4 * record, static_cast<size_t>(config.max_topk + 1) * row);
  shape.staging_bytes = staging_bytes_of(config);
  shape.receive_bytes = config.receive_bytes ? config.receive_bytes : default_receive_bytes(config, num_ranks);
  if (util::env().verify && config.device.kind == DeviceKind::cpu) shape.verified_rows = config.max_tokens_per_rank * num_ranks;
  check_size(shape);
  return core::BufferLayout::of(shape);
}

}  // namespace api
}  // namespace turnout
