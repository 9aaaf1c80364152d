// C: stores and communicators.
#include <mutex>
#include <vector>

#include "api/c_status.h"
#include "turnout/c/communicator.h"

using namespace turnout;
using namespace turnout::api;

struct turnout_store {
  std::shared_ptr<Store> store;
};

namespace {

class CallbackStore final : public Store {
 public:
  explicit CallbackStore(const turnout_store_callbacks& callbacks) : callbacks_(callbacks) {}

  void set(const std::string& key, std::span<const std::byte> value) override {
    const turnout_status status = callbacks_.set(callbacks_.context, key.c_str(), value.data(), value.size());
    if (status != TURNOUT_OK) refuse("set", key, status);
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    turnout_bytes value;
    const turnout_status status = callbacks_.get(callbacks_.context, key.c_str(), timeout.count(), &value);
    if (status != TURNOUT_OK) refuse("get", key, status);
    if (!value.given) return std::nullopt;
    return std::move(value.bytes);
  }
  void erase(const std::string& key) override {
    if (callbacks_.erase) callbacks_.erase(callbacks_.context, key.c_str());
  }

 private:
  [[noreturn]] static void refuse(const char* call, const std::string& key, turnout_status status) {
    throw TransportError(std::string("store: the callback ") + call + " of key " + key + " returned " + turnout_status_name(status) +
                         "; the store must answer on every rank");
  }
  turnout_store_callbacks callbacks_;
};

CommunicatorOptions to_options(const turnout_communicator_options* given) {
  CommunicatorOptions options;
  if (!given) return options;
  const auto c = read_struct(given, "options");
  if (c.transport) options.transport = c.transport;
  if (c.num_nodes_given > 0 && !c.node_of_rank)
    throw InvalidArgument("options: node_of_rank is null, but num_nodes_given is " + std::to_string(c.num_nodes_given));
  if (c.node_of_rank) options.node_of_rank.assign(c.node_of_rank, c.node_of_rank + c.num_nodes_given);
  if (c.timeout_ms < 0) throw InvalidArgument("options: timeout_ms is " + std::to_string(c.timeout_ms) + ", but must be 0 (the default) or more");
  if (c.timeout_ms > 0) options.timeout = std::chrono::milliseconds(c.timeout_ms);
  options.scheduler_seed = c.scheduler_seed;
  return options;
}

turnout_communicator* wrap(Communicator&& communicator) { return new turnout_communicator{std::move(communicator)}; }

}  // namespace

extern "C" {

turnout_status turnout_bytes_assign(turnout_bytes* value, const void* data, size_t num_bytes) {
  return guarded([&] {
    turnout_bytes& v = require(value, "value");
    if (num_bytes > 0 && !data) throw InvalidArgument("bytes_assign: data is null");
    const auto* bytes = static_cast<const std::byte*>(data);
    v.bytes.assign(bytes, bytes + num_bytes);
    v.given = true;
  });
}

turnout_status turnout_store_from_callbacks(const turnout_store_callbacks* callbacks, turnout_store** store) {
  return guarded([&] {
    turnout_store*& out = output(store, "store");
    const auto c = read_struct(callbacks, "callbacks");
    if (!c.set || !c.get) throw InvalidArgument(std::string("callbacks: ") + (c.set ? "get" : "set") + " is null");
    out = new turnout_store{std::make_shared<CallbackStore>(c)};
  });
}

turnout_status turnout_thread_store(turnout_store** store) {
  return guarded([&] { output(store, "store") = new turnout_store{thread_store()}; });
}

void turnout_store_destroy(turnout_store* store) { delete store; }

turnout_status turnout_communicator_from_env(const turnout_communicator_options* options, turnout_communicator** communicator) {
  return guarded([&] {
    turnout_communicator*& out = output(communicator, "communicator");
    out = wrap(Communicator::from_env(to_options(options)));
  });
}

turnout_status turnout_communicator_from_store(turnout_store* store, int32_t rank, int32_t num_ranks, const char* name,
                                               const turnout_communicator_options* options, turnout_communicator** communicator) {
  return guarded([&] {
    turnout_communicator*& out = output(communicator, "communicator");
    out = wrap(Communicator::from_store(require(store, "store").store, rank, num_ranks, name ? name : "world", to_options(options)));
  });
}

void turnout_communicator_destroy(turnout_communicator* communicator) { delete communicator; }

turnout_status turnout_communicator_get_info(const turnout_communicator* communicator, turnout_communicator_info* info) {
  return guarded([&] {
    const Communicator& c = require(communicator, "communicator").communicator;
    turnout_communicator_info value{};
    value.rank = c.rank();
    value.num_ranks = c.num_ranks();
    value.node = c.node();
    value.num_nodes = c.num_nodes();
    value.local_rank = c.local_rank();
    value.transport = communicator->transport.c_str();
    write_struct(info, value, "info");
  });
}

turnout_status turnout_communicator_all_gather(turnout_communicator* communicator, const void* mine, size_t num_bytes, void* all) {
  return guarded([&] {
    Communicator& c = require(communicator, "communicator").communicator;
    if (num_bytes > 0 && (!mine || !all)) throw InvalidArgument(std::string("all_gather: ") + (mine ? "all" : "mine") + " is null");
    const auto gathered = c.all_gather({static_cast<const std::byte*>(mine), num_bytes});
    for (size_t rank = 0; rank < gathered.size(); ++rank) {
      if (gathered[rank].size() == num_bytes) continue;
      throw InvalidArgument("all_gather: rank " + std::to_string(rank) + " gave " + std::to_string(gathered[rank].size()) + " bytes, rank " +
                            std::to_string(c.rank()) + " gave " + std::to_string(num_bytes) + "; all must give the same number");
    }
    if (num_bytes == 0) return;
    for (size_t rank = 0; rank < gathered.size(); ++rank)
      std::memcpy(static_cast<std::byte*>(all) + rank * num_bytes, gathered[rank].data(), num_bytes);
  });
}

turnout_status turnout_communicator_barrier(turnout_communicator* communicator) {
  return guarded([&] { require(communicator, "communicator").communicator.barrier(); });
}

turnout_status turnout_communicator_sub_group(turnout_communicator* communicator, const int32_t* members, size_t num_members, const char* name,
                                              turnout_communicator** group) {
  return guarded([&] {
    turnout_communicator*& out = output(group, "group");
    Communicator& c = require(communicator, "communicator").communicator;
    if (num_members > 0) require(members, "members");
    out = wrap(c.sub_group(std::span(members, num_members), name ? name : "sub"));
  });
}

turnout_status turnout_run_virtual_ranks(int32_t num_ranks, turnout_status (*body)(turnout_communicator* communicator, void* context), void* context,
                                         const turnout_communicator_options* options) {
  return guarded([&] {
    if (!body) throw InvalidArgument("run_virtual_ranks: body is null");
    run_virtual_ranks(
        num_ranks,
        [&](Communicator& communicator) {
          turnout_communicator wrapped{std::move(communicator)};
          const turnout_status status = body(&wrapped, context);
          if (status == TURNOUT_OK) return;
          // Words of this thread belong to this status only if they came with it.
          Failure failure = last_failure();
          if (failure.status != status)
            failure = {status, std::string("run_virtual_ranks: a body returned ") + turnout_status_name(status), false, {}};
          throw FailedElsewhere{failure};
        },
        to_options(options));
  });
}

}  // extern "C"
