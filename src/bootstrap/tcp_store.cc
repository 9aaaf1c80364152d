// How a job finds together: rank 0 listens and, on one host, leaves a secret; every rank, 0 too, connects, proves the secret
// and waits for the others at a named step.
#include "bootstrap/tcp_store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "bootstrap/client.h"
#include "bootstrap/launch_info.h"
#include "bootstrap/secret.h"
#include "bootstrap/server.h"
#include "bootstrap/timeout.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout {

namespace bootstrap {

namespace {

using std::chrono::milliseconds;

constexpr const char* kHowToShare =
    "export TURNOUT_SECRET (the same random text of 16 or more characters on all ranks), or TURNOUT_SECRET_FILE (a file of mode 0600 that holds it)";

/// Members are destroyed from the last to the first: this rank's connection, then the server, then the file.
class TcpStore final : public Store {
 public:
  std::unique_ptr<HostSecret> host_secret;
  std::unique_ptr<Server> server;
  std::unique_ptr<RemoteStore> remote;
  std::atomic<bool> forming{true};

  void set(const std::string& key, std::span<const std::byte> value) override { remote->set(key, value); }
  std::optional<std::vector<std::byte>> get(const std::string& key, milliseconds timeout) override {
    auto value = remote->get(key, timeout);
    if (server && forming) {  // rank 0 looks often while it waits for the others to come
      if (const std::string why = server->contradiction(); !why.empty()) throw InvalidArgument("rendezvous: " + why);
    }
    return value;
  }
  void erase(const std::string& key) override { remote->erase(key); }
};

/// One rank on its way in.
class Joining {
 public:
  Joining(const LaunchInfo& info, const TcpOptions& options, milliseconds timeout)
      : info_(info), options_(options), timeout_(timeout), start_(Clock::now()), deadline_(start_ + timeout) {}

  std::shared_ptr<Store> run() {
    check();
    choose_secret();
    auto store = std::make_shared<TcpStore>();
    if (info_.rank == 0) serve(*store);
    store->remote = connect();
    meet(store);
    return store;
  }

 private:
  void check() const {
    if (info_.num_ranks < 1 || info_.rank < 0 || info_.rank >= info_.num_ranks) {
      throw InvalidArgument("tcp_store: rank is " + std::to_string(info_.rank) + " of " + std::to_string(info_.num_ranks) + " ranks");
    }
    if (info_.port < 1 || info_.port > 65535) {
      throw InvalidArgument("tcp_store: port is " + std::to_string(info_.port) + ", but must be 1 to 65535: set TURNOUT_PORT");
    }
    if (info_.root_address.empty()) throw InvalidArgument("tcp_store: root_address is empty: set TURNOUT_ROOT to the host of rank 0");
  }

  /// Given by the user, or else on rank 0's host a file; other hosts are told what to export.
  void choose_secret() {
    secret_ = !options_.secret.empty() ? options_.secret : options_.secret_file.empty() ? "" : read_secret_file(options_.secret_file);
    if (!secret_.empty()) {
      if (secret_.size() < 16) util::log_once(util::LogLevel::warn, "the secret of the rendezvous has fewer than 16 characters: it can be guessed");
      return;
    }
    one_host_ = true;
    if (info_.rank != 0) {
      auto addresses = resolve(info_.root_address, info_.port, last_error_);
      while (addresses.empty()) {
        pause("find the address of rank 0");
        addresses = resolve(info_.root_address, info_.port, last_error_);
      }
      if (!is_local(addresses)) {
        throw InvalidArgument("rank " + std::to_string(info_.rank) + " runs on another host than rank 0 (" + info_.root_address +
                              "), and there is no secret: " + kHowToShare);
      }
    }
    secret_path_ = host_secret_path(runtime_folder(options_.runtime_folder), info_.job, info_.port);
  }

  /// Where rank 0 listens. Without a secret of the user's, loopback only.
  std::vector<Fd> listen() {
    std::vector<Address> candidates;
    if (!options_.interface.empty()) {
      candidates = interface_addresses(options_.interface, info_.port);
      if (one_host_ && !candidates.front().is_loopback()) {
        throw InvalidArgument("TURNOUT_INTERFACE is " + options_.interface + ", which other hosts can reach, but there is no secret: " + kHowToShare);
      }
    } else if (is_loopback_name(info_.root_address)) {
      candidates = resolve(info_.root_address, info_.port, last_error_);
    } else if (one_host_) {
      candidates = {loopback(AF_INET, info_.port), loopback(AF_INET6, info_.port)};
    } else {
      candidates = {any(AF_INET6, info_.port), any(AF_INET, info_.port)};
    }
    std::vector<Fd> listeners;
    for (const Address& address : candidates) {
      if (Fd fd = listen_on(address)) {
        listeners.push_back(std::move(fd));
        if (options_.interface.empty()) break;  // of an interface all: the address that others know may be any of them
      } else {
        last_error_ = address.to_string() + ": " + std::strerror(errno);  // NOLINT(concurrency-mt-unsafe)
      }
    }
    if (!listeners.empty()) return listeners;
    throw TransportError("rank 0 cannot listen for the rendezvous at " + last_error_);
  }

  void serve(TcpStore& store) {
    std::vector<Fd> listeners = listen();
    own_ = bound_address(listeners.front().get());
    if (own_.is_any()) own_ = loopback(own_.family(), info_.port);
    if (one_host_) {
      store.host_secret = std::make_unique<HostSecret>(secret_path_);
      secret_ = store.host_secret->secret();
    }
    ServerOptions options{.secret = secret_, .num_ranks = info_.num_ranks, .stranger_time = options_.stranger_time, .on_all_joined = {}};
    options.on_all_joined = [file = store.host_secret.get()] {
      if (file) file->remove();
    };
    store.server = std::make_unique<Server>(std::move(listeners), std::move(options));
  }

  /// Names may appear, and rank 0 may move its port open, while we wait: asked again for every attempt.
  std::vector<Address> targets() {
    if (info_.rank == 0) return {own_};
    if (!options_.interface.empty() && (one_host_ || is_loopback_name(info_.root_address)))
      return interface_addresses(options_.interface, info_.port);
    if (one_host_ && !is_loopback_name(info_.root_address)) return {loopback(AF_INET, info_.port), loopback(AF_INET6, info_.port)};
    return resolve(info_.root_address, info_.port, last_error_);
  }

  std::unique_ptr<RemoteStore> connect() {
    for (;;) {
      if (one_host_ && info_.rank != 0) {
        secret_ = read_host_secret(secret_path_).value_or("");
        if (secret_.empty()) last_error_ = "rank 0 has not left a secret at " + secret_path_ + " (if it runs on another host: " + kHowToShare + ")";
      }
      if (!secret_.empty()) {
        for (const Address& target : targets()) {
          if (auto store = attempt(target)) return store;
        }
      }
      pause("connect to rank 0");
    }
  }

  std::unique_ptr<RemoteStore> attempt(const Address& target) {
    const auto give_up = std::min(deadline_, Clock::now() + std::chrono::seconds(10));
    Fd fd = connect_to(target, give_up, last_error_);
    if (!fd) return nullptr;
    Channel channel(std::move(fd));
    auto shake = shake_hands(channel, secret_, static_cast<uint32_t>(info_.rank), static_cast<uint32_t>(info_.num_ranks), give_up);
    if (shake.session) return std::make_unique<RemoteStore>(std::move(channel), std::move(*shake.session), info_.rank, target.to_string());
    last_error_ = target.to_string() + ": " + shake.error;
    if (!shake.refusal) return nullptr;
    switch (*shake.refusal) {
      case Refusal::secret:
        if (one_host_) return nullptr;  // what an earlier job left behind, perhaps: rank 0 is about to replace it
        throw TransportError("rank " + std::to_string(info_.rank) + " and the rendezvous at " + target.to_string() +
                             " do not have the same secret: TURNOUT_SECRET or TURNOUT_SECRET_FILE must be the same on all ranks, "
                             "and TURNOUT_PORT another one if that is another job's");
      case Refusal::version: throw TransportError("rendezvous at " + last_error_ + ": the same release of Turnout is needed on all ranks");
      default: throw InvalidArgument("rendezvous at " + last_error_);
    }
  }

  /// Between attempts: little at first, ranks out of step. Throws at the deadline.
  void pause(const char* step) {
    const auto now = Clock::now();
    if (now >= deadline_) {
      WaitRecord record;
      record.rank = info_.rank;
      record.peers = {0};
      record.call = "bootstrap";
      record.phase = step;
      record.expected = 1;
      record.peer_state = "silent";
      throw PeerTimeout("bootstrap: " + std::string(step) + " (" + info_.root_address + " port " + std::to_string(info_.port) +
                            "): missing ranks [0]; rank " + std::to_string(info_.rank) + " waited " + std::to_string(timeout_.count()) +
                            " ms; last: " + last_error_,
                        record);
    }
    pause_ = std::min(pause_ * 3 / 2, milliseconds(200 + info_.rank % 7 * 10));
    std::this_thread::sleep_for(std::min<Clock::duration>(pause_, deadline_ - now));
  }

  void meet(const std::shared_ptr<TcpStore>& store) {
    try {
      store_bootstrap_since(start_, store, info_.rank, info_.num_ranks, "rendezvous", timeout_)->barrier("join the rendezvous");
      store->forming = false;
    } catch (const PeerTimeout& e) {
      std::string more = store->server ? store->server->refusals() : "";
      if (one_host_) more.append("\n  no secret was given, so only ranks of this host could join; otherwise: ").append(kHowToShare);
      throw PeerTimeout(e.what() + more, e.record());
    }
  }

  const LaunchInfo& info_;
  const TcpOptions& options_;
  const milliseconds timeout_;
  const Clock::time_point start_, deadline_;
  std::string secret_, secret_path_, last_error_ = "no attempt was made";
  bool one_host_ = false;
  Address own_;  ///< rank 0: where its own server is
  milliseconds pause_{4};
};

}  // namespace

std::shared_ptr<Store> open_tcp_store(const LaunchInfo& info, const TcpOptions& options, milliseconds timeout) {
  const milliseconds limit = checked_timeout("tcp_store", timeout);
  if (info.num_ranks == 1 && info.rank == 0) return thread_store();  // nobody to meet, nothing to open
  return Joining(info, options, limit).run();
}

}  // namespace bootstrap

inline namespace v0 {
std::shared_ptr<Store> tcp_store(const LaunchInfo& info, std::chrono::milliseconds timeout) {
  const util::Env env = util::read_env(bootstrap::process_environment);
  bootstrap::TcpOptions options;
  options.secret = env.secret;
  options.secret_file = env.secret_file;
  options.interface = env.interface;
  return bootstrap::open_tcp_store(info, options, timeout);
}
}  // namespace v0

}  // namespace turnout
