// From a configuration to the arena: the one sizing function, for required_bytes() and the constructor alike.
#pragma once
#include "core/buffer_layout.h"
#include "turnout/config.h"

namespace turnout::api {

/// What a window of this layout takes, signals included: required_bytes(), and what the constructor allocates.
size_t arena_bytes(const core::BufferLayout& layout);

/// What the configuration says, else the environment; 0: the layout chooses.
size_t staging_bytes_of(const BufferConfig& config);

core::BufferLayout arena_of(const BufferConfig& config, int num_ranks);

}  // namespace turnout::api
