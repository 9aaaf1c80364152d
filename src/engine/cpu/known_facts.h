// What calls of one description have in common of their facts.
#pragma once
#include <cstdint>

#include "engine/cpu/header.h"

namespace turnout::engine {

/// The facts that calls of one description share, and what they give to the fingerprint: epoch and handle are left out (0).
struct KnownFacts {
  CallFacts facts;
  uint64_t sum = 0;
  static KnownFacts of(CallFacts facts) {
    facts.epoch = facts.handle = 0;
    return {facts, fingerprint(facts)};
  }
};
/// Of the facts with an epoch and a handle.
uint64_t fingerprint(const KnownFacts& known, int64_t epoch, int64_t handle);

}  // namespace turnout::engine
