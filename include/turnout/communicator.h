// Communicator: who the ranks are and how they reach each other.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "turnout/bootstrap.h"
#include "turnout/error.h"

namespace turnout {
inline namespace v0 {

namespace internal {
class CommunicatorImpl;
}

/// What a Communicator may be told. What is left as it is comes from the environment (docs/env.md) where it names a variable.
struct CommunicatorOptions {
  /// "auto", or the name of a transport: "inproc" (threads), "shm" (processes of one machine). An explicit name that
  /// cannot be had is an error; "auto" is TURNOUT_TRANSPORT, and where that says nothing the best that all ranks have.
  std::string transport = "auto";
  /// Node of every rank, e.g. {0,0,1}, the same on all ranks; empty: each rank's TURNOUT_NODE_ID, else one node. Only the order
  /// of sums depends on it where all ranks reach each other by load and store. The numbers are labels: nodes are numbered, and their sums
  /// added, in the order of their lowest ranks: {2,0,1} is {0,1,2}.
  std::vector<int> node_of_rank{};
  /// Of each bootstrap step; 0: TURNOUT_BOOTSTRAP_TIMEOUT_MS, which is 60 s unless set. From a bootstrap of the caller's: its own.
  std::chrono::milliseconds timeout{0};
  /// inproc only: non-zero delays and reorders puts and signals by this seed (tests; see docs/design/transport.md). No variable.
  uint64_t scheduler_seed = 0;
};

/// A group of ranks. Movable owner; Buffers made from it keep what they need alive, so it may be destroyed first.
/// Destruction is local: it never waits for a peer. Collective calls (making a Buffer is one) come in the same order on all ranks:
/// threads of a rank that make some at the same time need an order of their own, or a sub_group() each.
class TURNOUT_API Communicator {
 public:
  /// From the environment of torchrun, mpirun, srun or `turnout launch`; without any of them, one rank. Collective.
  static Communicator from_env(const CommunicatorOptions& options = {});
  /// From a store that the caller supplies (torch's, MPI's, thread_store()). Collective over `num_ranks` ranks;
  /// `name` tells apart Communicators that share a store and form at one time; it may be used again and again.
  static Communicator from_store(std::shared_ptr<Store> store, int rank, int num_ranks, const std::string& name = "world",
                                 const CommunicatorOptions& options = {});
  /// From a bootstrap of the caller's. Collective.
  static Communicator from_bootstrap(std::unique_ptr<Bootstrap> bootstrap, const CommunicatorOptions& options = {});

  Communicator(Communicator&&) noexcept;
  Communicator& operator=(Communicator&&) noexcept;
  ~Communicator();

  int rank() const;
  int num_ranks() const;
  int num_nodes() const;
  int node() const;        ///< of this rank: nodes are numbered in the order of their lowest ranks
  int local_rank() const;  ///< index within the node
  std::string_view transport() const;

  /// Every rank's bytes, in rank order. Collective. Throws: PeerTimeout, TransportError.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine);
  /// Returns when every rank has arrived. Collective.
  void barrier();
  /// A Communicator of `members` (ascending ranks of this one, this rank included). Collective over the members.
  Communicator sub_group(std::span<const int> members, std::string_view name = "sub");

  const std::shared_ptr<internal::CommunicatorImpl>& impl() const { return impl_; }

 private:
  explicit Communicator(std::shared_ptr<internal::CommunicatorImpl> impl);
  std::shared_ptr<internal::CommunicatorImpl> impl_;
};

/// Runs `body` on `num_ranks` threads, each a virtual rank with its own Communicator, and returns when all are done.
/// The first exception of the lowest rank that threw is rethrown. Throws: InvalidArgument, TransportError if the system has no more
/// threads (then no body was run).
TURNOUT_API void run_virtual_ranks(int num_ranks, const std::function<void(Communicator&)>& body, const CommunicatorOptions& options = {});

/// "major.minor.patch" of the loaded library.
TURNOUT_API std::string_view version();

}  // namespace v0
}  // namespace turnout
