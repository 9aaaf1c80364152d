// Communicator: bootstrap, transport and topology of a group.
#include "turnout/communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "api/communicator_impl.h"
#include "transport/registry.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout {
inline namespace v0 {

namespace {

std::string text_of(const std::vector<int>& nodes) {
  if (nodes.empty()) return "nothing";
  std::string text;
  for (const int node : nodes) text += (text.empty() ? "{" : ", ") + std::to_string(node);
  return text + "}";
}

/// The first that ranks tell each other, whatever their release: which one it is. What follows is that release's own.
struct Greeting {
  char library[24] = {};
};

/// Ranks of different releases are told so before anything of one is read by another.
void check_releases(const std::vector<std::vector<std::byte>>& said) {
  std::vector<std::string> releases;
  for (const auto& bytes : said) {
    Greeting theirs;
    std::memcpy(&theirs, bytes.data(), std::min(bytes.size(), sizeof theirs));
    releases.emplace_back(theirs.library, strnlen(theirs.library, sizeof theirs.library));
  }
  if (std::all_of(releases.begin(), releases.end(), [&](const std::string& release) { return release == version(); })) return;
  std::string table;
  for (size_t rank = 0; rank < releases.size(); ++rank) table += (rank ? ", rank " : " rank ") + std::to_string(rank) + " = " + releases[rank];
  throw InvalidArgument("Communicator: ranks have different releases of Turnout; install the same on all\n  library:" + table);
}

/// Ranks that reach each other by load and store are one node, unless the caller or TURNOUT_NODE_ID says otherwise. Every rank
/// looks at what every rank was given, so that all raise if one has to.
core::Topology topology_of(const CommunicatorOptions& options, Bootstrap& bootstrap) {
  const auto num_ranks = static_cast<size_t>(bootstrap.num_ranks());
  Greeting greeting;
  std::copy_n(version().data(), std::min(version().size(), sizeof greeting.library), greeting.library);
  std::vector<int> mine(sizeof greeting / sizeof(int));
  std::memcpy(mine.data(), &greeting, sizeof greeting);
  mine.push_back(util::env().node_id.value_or(0));  // then what the caller gave
  mine.insert(mine.end(), options.node_of_rank.begin(), options.node_of_rank.end());
  const auto said = bootstrap.all_gather("nodes", std::as_bytes(std::span(mine)));
  check_releases(said);
  std::vector<int> labels;
  std::vector<std::vector<int>> given;
  for (const auto& bytes : said) {
    if (bytes.size() <= sizeof greeting) throw TransportError("Communicator: what a rank says of its node is cut short");
    std::vector<int> theirs((bytes.size() - sizeof greeting) / sizeof(int));
    std::memcpy(theirs.data(), bytes.data() + sizeof greeting, theirs.size() * sizeof(int));
    labels.push_back(theirs.at(0));
    given.emplace_back(theirs.begin() + 1, theirs.end());
  }
  for (size_t rank = 0; rank < given.size(); ++rank) {
    if (given[rank].empty() || given[rank].size() == num_ranks) continue;
    throw InvalidArgument("CommunicatorOptions: node_of_rank of rank " + std::to_string(rank) + " has " + std::to_string(given[rank].size()) +
                          " entries for " + std::to_string(num_ranks) + " ranks");
  }
  for (size_t rank = 1; rank < given.size(); ++rank) {
    if (given[rank] == given[0]) continue;
    throw InvalidArgument("CommunicatorOptions: ranks disagree about node_of_rank: rank 0 was given " + text_of(given[0]) + ", rank " +
                          std::to_string(rank) + " " + text_of(given[rank]) + "; give all the same");
  }
  return core::Topology::of(options.node_of_rank.empty() ? labels : options.node_of_rank);
}

/// Variables that nobody knows are told once per job: by its rank 0, or by the rank 0 of a job without a launcher.
void report_environment(const Bootstrap& bootstrap) {
  if (bootstrap.rank() != 0) return;
  try {
    if (launch_info_from_env().rank != 0) return;
  } catch (const InvalidArgument&) {
    // What a launcher says matters to from_env() only.
  }
  util::report_unknown_variables();
  if (const auto level = util::env().ib_service_level) {
    util::log_once(util::LogLevel::warn, "TURNOUT_IB_SL is " + std::to_string(*level) + " and has no effect: no transport here uses InfiniBand");
  }
}

/// Threads that wait until all of them are there; if one cannot be had, none of them runs.
class Gate {
 public:
  /// True if the threads shall run.
  bool wait() {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [&] { return state_ != State::shut; });
    return state_ == State::open;
  }
  void open(bool run) {
    {
      std::lock_guard lock(mutex_);
      state_ = run ? State::open : State::given_up;
    }
    opened_.notify_all();
  }

 private:
  enum class State { shut, open, given_up } state_ = State::shut;
  std::mutex mutex_;
  std::condition_variable opened_;
};

}  // namespace

namespace {

internal::CommunicatorImpl& body(const std::shared_ptr<internal::CommunicatorImpl>& impl, const char* call) {
  if (!impl) throw InvalidArgument(std::string(call) + ": this Communicator was moved from");
  return *impl;
}

}  // namespace

Communicator::Communicator(std::shared_ptr<internal::CommunicatorImpl> impl) : impl_(std::move(impl)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

Communicator Communicator::from_bootstrap(std::unique_ptr<Bootstrap> bootstrap, const CommunicatorOptions& options) {
  if (!bootstrap) throw InvalidArgument("Communicator: bootstrap is null");
  report_environment(*bootstrap);
  auto impl = std::make_shared<internal::CommunicatorImpl>();
  impl->options = options;
  impl->topology = topology_of(options, *bootstrap);
  impl->transport = transport::make_transport({.bootstrap = *bootstrap, .name = options.transport, .scheduler_seed = options.scheduler_seed});
  impl->bootstrap = std::move(bootstrap);
  if (impl->transport->rank() == 0) {
    util::log(util::LogLevel::info,
              std::to_string(impl->transport->num_ranks()) + " ranks over " + std::string(impl->transport->name()) +
                  ", nodes: " + std::to_string(impl->topology.num_nodes()),
              0);
  }
  return Communicator(std::move(impl));
}

Communicator Communicator::from_store(std::shared_ptr<Store> store, int rank, int num_ranks, const std::string& name,
                                      const CommunicatorOptions& options) {
  return from_bootstrap(store_bootstrap(std::move(store), rank, num_ranks, name, options.timeout), options);
}

Communicator Communicator::from_env(const CommunicatorOptions& options) {
  const LaunchInfo info = launch_info_from_env();
  if (info.num_ranks == 1) return from_store(thread_store(), 0, 1, "world", options);
  return from_store(tcp_store(info, options.timeout), info.rank, info.num_ranks, "world", options);
}

int Communicator::rank() const { return body(impl_, "rank").bootstrap->rank(); }
int Communicator::num_ranks() const { return body(impl_, "num_ranks").bootstrap->num_ranks(); }
int Communicator::num_nodes() const { return body(impl_, "num_nodes").topology.num_nodes(); }
int Communicator::node() const { return body(impl_, "node").topology.node_of(rank()); }
int Communicator::local_rank() const { return body(impl_, "local_rank").topology.local_rank(rank()); }
std::string_view Communicator::transport() const { return body(impl_, "transport").transport->name(); }

std::vector<std::vector<std::byte>> Communicator::all_gather(std::span<const std::byte> mine) {
  std::lock_guard lock(body(impl_, "all_gather").mutex);
  return impl_->bootstrap->all_gather("all_gather", mine);
}

void Communicator::barrier() {
  std::lock_guard lock(body(impl_, "barrier").mutex);
  impl_->bootstrap->barrier("barrier");
}

Communicator Communicator::sub_group(std::span<const int> members, std::string_view name) {
  CommunicatorOptions options = body(impl_, "sub_group").options;
  if (!options.node_of_rank.empty()) {
    std::vector<int> nodes;
    for (int member : members) nodes.push_back(impl_->topology.node_of(member));
    options.node_of_rank = nodes;
  }
  std::unique_ptr<Bootstrap> bootstrap;
  {
    std::lock_guard lock(impl_->mutex);
    bootstrap = impl_->bootstrap->sub_group(members, name);
  }
  return from_bootstrap(std::move(bootstrap), options);
}

void run_virtual_ranks(int num_ranks, const std::function<void(Communicator&)>& body, const CommunicatorOptions& options) {
  if (num_ranks < 1) throw InvalidArgument("run_virtual_ranks: num_ranks is " + std::to_string(num_ranks) + ", but must be 1 or more");
  if (!body) throw InvalidArgument("run_virtual_ranks: body is empty");
  auto store = thread_store();
  Gate gate;
  std::string trouble;
  std::vector<std::exception_ptr> failures(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks && trouble.empty(); ++rank) {
    const auto run = [&, rank] {
      if (!gate.wait()) return;
      try {
        Communicator communicator = Communicator::from_store(store, rank, num_ranks, "virtual", options);
        body(communicator);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    };
    try {
      threads.emplace_back(run);
    } catch (const std::system_error& e) {
      trouble = e.code().message();
    }
  }
  gate.open(trouble.empty());
  for (auto& thread : threads) thread.join();
  if (!trouble.empty()) {
    throw TransportError("run_virtual_ranks: the system gave " + std::to_string(threads.size()) + " of " + std::to_string(num_ranks) + " threads (" +
                         trouble + "); use fewer ranks, or raise the limits of threads and memory (ulimit -u, ulimit -v)");
  }
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::string_view version() { return "0.1.0"; }

}  // namespace v0
}  // namespace turnout
