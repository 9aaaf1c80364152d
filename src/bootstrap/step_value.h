// What lies under a key of a store: how many ranks its writer counts, the step's name, and a rank's bytes (arrived) or a note (given_up).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "turnout/error.h"

namespace turnout::bootstrap {

enum class Kind : uint8_t { arrived, given_up };

struct Value {
  Kind kind;
  int num_ranks;
  std::string step;
  std::vector<std::byte> bytes;
};

/// What every value begins with.
struct ValueHead {
  int32_t kind, num_ranks;
  uint32_t step_bytes;
};

inline std::vector<std::byte> pack(Kind kind, int num_ranks, std::string_view step, std::span<const std::byte> bytes) {
  const ValueHead head{static_cast<int32_t>(kind), num_ranks, static_cast<uint32_t>(step.size())};
  std::vector<std::byte> out(sizeof head + step.size() + bytes.size());
  std::memcpy(out.data(), &head, sizeof head);
  if (!step.empty()) std::memcpy(out.data() + sizeof head, step.data(), step.size());
  if (!bytes.empty()) std::memcpy(out.data() + sizeof head + step.size(), bytes.data(), bytes.size());
  return out;
}

inline Value unpack(const std::vector<std::byte>& value) {
  ValueHead head{};
  if (value.size() >= sizeof head) std::memcpy(&head, value.data(), sizeof head);
  if (value.size() < sizeof head + head.step_bytes) {
    throw TransportError("bootstrap: a value in the store is cut short; is its key used by somebody else?");
  }
  Value out{static_cast<Kind>(head.kind), head.num_ranks, {}, {value.begin() + static_cast<int64_t>(sizeof head + head.step_bytes), value.end()}};
  out.step.assign(reinterpret_cast<const char*>(value.data()) + sizeof head, head.step_bytes);
  return out;
}

}  // namespace turnout::bootstrap
