// The proof that memory is shared, made when a window is opened: every rank's GPU stores a word into every peer's memory and
// loads it back, and every rank finds in its own memory what the others wrote.
#pragma once
#include <cstddef>
#include <string_view>
#include <vector>

#include "turnout/bootstrap.h"

namespace turnout::transport::device {

/// Bytes at the start of every window that the probe writes; zero again when it returns.
constexpr size_t probe_bytes(int num_ranks) { return static_cast<size_t>(num_ranks) * 16; }

/// Collective. `memory[r]`: rank r's memory as `device` addresses it. Throws alike on all ranks: TransportError.
void probe(Bootstrap& bootstrap, std::string_view step, const std::vector<std::byte*>& memory, int device);

}  // namespace turnout::transport::device
