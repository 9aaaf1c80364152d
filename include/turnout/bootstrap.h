// How ranks find each other: a store of bytes, and the collective steps built on it.
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "turnout/error.h"
#include "turnout/visibility.h"

namespace turnout {
inline namespace v0 {

/// A key-value store shared by all ranks: torch.distributed's Store, MPI's name service, or one of ours.
/// Keys are written once, but for a step that failed: its keys are then set again; they have at most 160 bytes. Calls may come from several threads.
class TURNOUT_API Store {
 public:
  virtual ~Store();
  /// Publishes `value` under `key`. Throws: TransportError if the store cannot be reached.
  virtual void set(const std::string& key, std::span<const std::byte> value) = 0;
  /// The value of `key`, waiting up to `timeout` for it to appear; nullopt if it did not.
  virtual std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) = 0;
  /// Forgets `key`, if the store can; used to keep long jobs from growing: by sub-groups that are destroyed, too.
  virtual void erase(const std::string& key);
};

/// Facts of this process's place in the job, as a launcher's environment tells them.
struct LaunchInfo {
  int rank = 0;
  int num_ranks = 1;
  int local_rank = 0;
  std::string root_address;  ///< host name or address of rank 0; IPv6 without brackets
  int port = 0;              ///< of the rendezvous: TURNOUT_PORT, else MASTER_PORT + 1
  std::string launcher;      ///< "turnout", "torchrun", "openmpi", "mpich", "slurm", or "none" (one rank)
  std::string job;           ///< names the job on this host: keys the secret file
};

/// Reads the environment of torchrun, Open MPI, MPICH, srun or `turnout launch` (docs/launch.md).
/// Throws: InvalidArgument naming the variable that is missing or malformed.
TURNOUT_API LaunchInfo launch_info_from_env();

/// Collective steps among `num_ranks` ranks; each step has a name and a deadline, and an expiry names the missing ranks.
class TURNOUT_API Bootstrap {
 public:
  virtual ~Bootstrap();
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  /// Every rank's bytes, in rank order; sizes may differ by rank. Collective.
  /// Throws: PeerTimeout naming the step and the missing ranks; TransportError.
  virtual std::vector<std::vector<std::byte>> all_gather(std::string_view step, std::span<const std::byte> mine) = 0;
  /// Returns when every rank has arrived at the step. Collective. Throws as all_gather.
  virtual void barrier(std::string_view step) = 0;
  /// The same steps among the ranks of `members` (ascending ranks of this bootstrap, this one included);
  /// `name` tells apart groups of the same members. Collective over the members only.
  virtual std::unique_ptr<Bootstrap> sub_group(std::span<const int> members, std::string_view name) = 0;
};

/// Collective steps over a store that the caller supplies. `name` prefixes every key; groups may use one name of one store again, one after
/// the other, and a job that is started anew may use a store that lives on (docs/design/bootstrap.md). A timeout of 0 is TURNOUT_BOOTSTRAP_TIMEOUT_MS
/// (60 s). The store must outlive the result, hence shared ownership.
TURNOUT_API std::unique_ptr<Bootstrap> store_bootstrap(std::shared_ptr<Store> store, int rank, int num_ranks, std::string name,
                                                       std::chrono::milliseconds timeout = {});

/// A store in this process's memory, for ranks that are threads.
TURNOUT_API std::shared_ptr<Store> thread_store();

/// The store that rank 0 serves over TCP and all ranks reach with the job's secret (docs/launch.md). Collective.
/// `timeout` as in store_bootstrap. Throws: PeerTimeout with the missing ranks, TransportError (port, address, wrong secret), InvalidArgument (no
/// secret beyond one host).
TURNOUT_API std::shared_ptr<Store> tcp_store(const LaunchInfo& info, std::chrono::milliseconds timeout = {});

}  // namespace v0
}  // namespace turnout
