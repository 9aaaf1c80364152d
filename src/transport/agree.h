// A step that may fail on one rank only (no memory, no descriptors): every rank tells, so that all fail at once and alike
// instead of waiting for the one that gave up.
#pragma once
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "turnout/bootstrap.h"

namespace turnout::transport {

/// What a rank said: `refusal` is why it could not, else `made` is what it made.
struct Said {
  std::string facts, refusal, made;
};

/// Runs `make` and gathers what every rank made, or why it could not. `facts` are what must be equal on all ranks. Collective.
/// Throws: only what the bootstrap throws; what `make` throws becomes a refusal.
std::vector<Said> tell_all(Bootstrap& bootstrap, std::string_view step, const std::string& facts, const std::function<std::string()>& make);

/// Throws alike on all ranks: TransportError with each rank that refused, InvalidArgument if facts differ.
void check_agreed(const std::vector<Said>& all, int rank, std::string_view step);

}  // namespace turnout::transport
