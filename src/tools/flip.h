// One bit that flips on its way: a transport in front of another, for `turnout demo --corrupt`. Behind it ranks do not reach each
// other's memory by load and store, so that all they send passes here.
#pragma once
#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace turnout::tools {

/// Which bit: in the first message to another rank that holds `row`, once there is one. Shared with the windows that are opened.
struct Flip {
  std::vector<std::byte> row;  ///< set before `armed`
  size_t byte = 0;             ///< of the row
  std::byte mask{};
  std::atomic<bool> armed{false}, done{false};
};

std::shared_ptr<transport::Transport> with_flip(std::shared_ptr<transport::Transport> inner, std::shared_ptr<Flip> flip);

}  // namespace turnout::tools
