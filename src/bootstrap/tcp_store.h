// tcp_store() with everything that it takes from the environment as an argument.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "turnout/bootstrap.h"

namespace turnout::bootstrap {

struct TcpOptions {
  std::string secret;          ///< TURNOUT_SECRET
  std::string secret_file;     ///< TURNOUT_SECRET_FILE
  std::string interface;       ///< TURNOUT_INTERFACE
  std::string runtime_folder;  ///< of the host's secret; empty: the user's
  std::chrono::milliseconds stranger_time = std::chrono::seconds(5);
};

std::shared_ptr<Store> open_tcp_store(const LaunchInfo& info, const TcpOptions& options, std::chrono::milliseconds timeout);

}  // namespace turnout::bootstrap
