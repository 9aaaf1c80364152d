// Communicator: bootstrap, transport and topology of a group.
#include "turnout/communicator.h"

#include <cstring>
#include <exception>
#include <thread>

#include "api/communicator_impl.h"
#include "transport/registry.h"
#include "util/env.h"

namespace turnout {
inline namespace v0 {

namespace {

/// Ranks that reach each other by load and store are one node, unless the caller or TURNOUT_NODE_ID says otherwise.
core::Topology topology_of(const CommunicatorOptions& options, Bootstrap& bootstrap) {
  const int num_ranks = bootstrap.num_ranks();
  if (!options.node_of_rank.empty() && static_cast<int>(options.node_of_rank.size()) != num_ranks) {
    throw InvalidArgument("CommunicatorOptions: node_of_rank has " + std::to_string(options.node_of_rank.size()) + " entries for " +
                          std::to_string(num_ranks) + " ranks");
  }
  const auto me = static_cast<size_t>(bootstrap.rank());
  const int mine = options.node_of_rank.empty() ? util::env().node_id.value_or(0) : options.node_of_rank[me];
  std::vector<int> labels;
  for (const auto& bytes : bootstrap.all_gather("nodes", std::as_bytes(std::span(&mine, 1)))) {
    int label = 0;
    if (bytes.size() == sizeof label) std::memcpy(&label, bytes.data(), sizeof label);
    labels.push_back(label);
  }
  if (!options.node_of_rank.empty() && labels != options.node_of_rank) {
    throw InvalidArgument("CommunicatorOptions: ranks disagree about node_of_rank");
  }
  return core::Topology::of(labels);
}

}  // namespace

Communicator::Communicator(std::shared_ptr<internal::CommunicatorImpl> impl) : impl_(std::move(impl)) {}
Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&&) noexcept = default;
Communicator::~Communicator() = default;

Communicator Communicator::from_bootstrap(std::unique_ptr<Bootstrap> bootstrap, const CommunicatorOptions& options) {
  auto impl = std::make_shared<internal::CommunicatorImpl>();
  impl->options = options;
  impl->topology = topology_of(options, *bootstrap);
  impl->transport = transport::make_transport({.bootstrap = *bootstrap, .name = options.transport, .scheduler_seed = options.scheduler_seed});
  impl->bootstrap = std::move(bootstrap);
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

int Communicator::rank() const { return impl_->bootstrap->rank(); }
int Communicator::num_ranks() const { return impl_->bootstrap->num_ranks(); }
int Communicator::num_nodes() const { return impl_->topology.num_nodes(); }
int Communicator::node() const { return impl_->topology.node_of(rank()); }
int Communicator::local_rank() const { return impl_->topology.local_rank(rank()); }
std::string_view Communicator::transport() const { return impl_->transport->name(); }

std::vector<std::vector<std::byte>> Communicator::all_gather(std::span<const std::byte> mine) {
  std::lock_guard lock(impl_->mutex);
  return impl_->bootstrap->all_gather("all_gather", mine);
}

void Communicator::barrier() {
  std::lock_guard lock(impl_->mutex);
  impl_->bootstrap->barrier("barrier");
}

Communicator Communicator::sub_group(std::span<const int> members, std::string_view name) {
  CommunicatorOptions options = impl_->options;
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
  auto store = thread_store();
  std::vector<std::exception_ptr> failures(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Communicator communicator = Communicator::from_store(store, rank, num_ranks, "virtual", options);
        body(communicator);
      } catch (...) {
        failures[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::string_view version() { return "0.1.0"; }

}  // namespace v0
}  // namespace turnout
