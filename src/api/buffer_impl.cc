// Calls: checked, given an epoch, driven. A refused call consumes its epoch on all ranks.
#include "api/buffer_impl.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <numeric>
#include <span>
#include <sstream>
#include <string>
#include <system_error>

#include "api/agreement.h"
#include "api/arguments.h"
#include "api/layout.h"
#include "engine/cpu/block_cache.h"
#include "engine/cpu/refused_call.h"
#include "engine/cpu/send_list.h"
#include "transport/idler.h"
#include "util/env.h"
#include "util/log.h"

namespace turnout {
inline namespace v0 {
namespace internal {

using engine::Lane;

BufferImpl::BufferImpl(std::shared_ptr<CommunicatorImpl> communicator, const BufferConfig& config, Allocator* allocator)
    : communicator_(std::move(communicator)) {
  if (!communicator_) throw InvalidArgument("Buffer: the Communicator was moved from");
  transport::Transport& transport = *communicator_->transport;
  std::string refusal;
  try {
    config.validate(transport.num_ranks());
  } catch (const InvalidArgument& e) {
    refusal = e.what();
  }
  // All steps in one piece: another thread's Buffer on this Communicator comes before or after.
  std::unique_lock steps(communicator_->mutex);
  if (refusal.empty()) agree(config);
  else communicator_->bootstrap->all_gather("Buffer configuration", std::as_bytes(std::span("refused", 7)));
  if (!refusal.empty()) throw InvalidArgument(refusal);

  // Beside a device the host only keeps the group together: who aborted, who closed.
  BufferConfig on_host = config;
  if (config.device.kind != DeviceKind::cpu) {
    open_device(config, allocator);
    on_host.receive_bytes = on_host.staging_bytes = 4096;
    on_host.touch_pages = false;
    allocator = nullptr;
  }
  const core::BufferLayout layout = api::arena_of(on_host, transport.num_ranks());
  std::unique_ptr<transport::Window> window = transport.open("buffer", layout.num_bytes, layout.num_signals());
  steps.unlock();
  if (config.touch_pages) std::memset(window->local() + layout.receive, 0, layout.receive_bytes);
  context_ = std::make_shared<engine::Context>(communicator_->transport, std::move(window), layout, communicator_->topology, config, allocator);
  if (device_) {
    device_->watch([c = context_](int peer) { return c->has_closed(peer); }, [c = context_] { c->check_abort(); });
  }
  for (int lane = 0; lane < config.num_lanes; ++lane) lanes_.push_back(std::make_unique<Lane>(context_, lane));
  known_.resize(lanes_.size());
  std::vector<Lane*> siblings;
  for (auto& lane : lanes_) siblings.push_back(lane.get());
  for (auto& lane : lanes_) lane->set_siblings(siblings);
  if (!util::admits(util::LogLevel::debug)) return;
  util::log(util::LogLevel::debug,
            "Buffer: " + std::to_string(config.num_experts) + " experts, " + std::to_string(config.max_tokens_per_rank) + " tokens of " +
                std::to_string(config.hidden) + " " + std::string(turnout::name(config.dtype)) + " at most, " +
                std::to_string(required_bytes(config, transport.num_ranks()) >> 10) + " KiB of symmetric memory",
            transport.rank());
}

/// Every fact of the configuration on every rank, compared; a difference raises on all ranks.
void BufferImpl::agree(const BufferConfig& config) {
  const core::ExpertMap split_map = core::ExpertMap::split(config.num_experts, communicator_->transport->num_ranks());
  const std::span<const int> split = split_map.owners();
  std::vector<int> own(split.size());
  std::iota(own.begin(), own.end(), 0);
  const api::ConfigurationFacts facts = {
      {"num_experts", std::to_string(config.num_experts)},
      {"hidden", std::to_string(config.hidden)},
      {"dtype", std::string(name(config.dtype))},
      {"max_tokens_per_rank", std::to_string(config.max_tokens_per_rank)},
      {"max_topk", std::to_string(config.max_topk)},
      {"max_side_bytes", std::to_string(config.max_side_bytes)},
      {"num_lanes", std::to_string(config.num_lanes)},
      {"max_outstanding", std::to_string(config.max_outstanding)},
      {"receive_bytes", std::to_string(config.receive_bytes)},
      {"staging_bytes", std::to_string(api::staging_bytes_of(config))},
      {"expert_to_rank", api::text_of_map(config.expert_to_rank, split)},
      {"replica_of", api::text_of_map(config.replica_of, own)},
      {"device", std::string(name(config.device.kind))},
      {"library", std::string(version())},
      {"TURNOUT_VERIFY", util::env().verify ? "1" : "0"},
  };
  std::string mine;
  for (const auto& [fact, value] : facts) mine += value + '\n';
  const auto all = communicator_->bootstrap->all_gather("Buffer configuration", std::as_bytes(std::span(mine.data(), mine.size())));
  api::compare_configurations(facts, all, split, own);
}

void BufferImpl::require_open(const char* call) const {
  if (!context_->process.is_this()) [[unlikely]] {
    throw InvalidArgument(std::string(call) + ": this process is a child, made by fork(), of the one that made this Buffer; only that one is rank " +
                          std::to_string(context_->rank) + ": start ranks as programs of their own, or make the Communicator after fork()");
  }
  if (context_->closed.load(std::memory_order_acquire)) throw InvalidArgument(std::string(call) + ": this Buffer is closed");
}

/// Tells all ranks that this one does not make the call, which consumes its epoch, and throws the reason.
template <class Args>
void BufferImpl::refuse(const Args& args, Lane& lane, const std::exception_ptr& why) {
  const uint64_t epoch = lane.take_epoch();
  auto call =
      std::make_shared<engine::RefusedCall>(context_, lane.index(), epoch, lane.first_epoch(), api::facts_of(*context_, args),
                                            engine::Reason::of(why), lane.closing_call(epoch - static_cast<uint64_t>(context_->layout.depth)));
  lane.add(call);
  lane.drive(*call, Lane::Until::sent);
  lane.remove(call.get());
  std::rethrow_exception(why);
}

namespace {

void check_outstanding(const BufferConfig& config, const Lane& lane, const char* name) {
  if (lane.num_outstanding() < config.max_outstanding) return;
  throw InvalidArgument(std::string(name) + ": lane " + std::to_string(lane.index()) + " has " + std::to_string(lane.num_outstanding()) +
                        " calls in flight, at most " + std::to_string(config.max_outstanding) + " (max_outstanding); wait for one first");
}

const DispatchArgs& lasting(const DispatchArgs& args, PendingImpl& pending) { return pending.dispatch_args.emplace(args); }
const CombineArgs& lasting(const CombineArgs& args, PendingImpl& pending) { return pending.combine_args.emplace(args); }
const char* name_of(const DispatchArgs&) { return "dispatch"; }
const char* name_of(const CombineArgs&) { return "combine"; }

}  // namespace

/// Nobody can tell which call of the others this one should have been, so none of them can fail in its place: the Buffer stops.
void BufferImpl::stop_for_lane(const char* call, int lane) {
  WaitRecord record;
  record.rank = context_->rank;
  record.lane = lane;
  record.call = call;
  context_->stop({engine::Abort::Kind::invalid_argument, std::string(call) + ": " + api::lane_problem(context_->config, lane), record});
}

std::shared_ptr<PendingImpl> BufferImpl::new_pending(int lane) {
  auto pending = std::make_shared<PendingImpl>(this, lane);
  pending->keeper = shared_from_this();
  return pending;
}

template <class Args>
std::shared_ptr<PendingImpl> BufferImpl::start(const Args& args, PendingImpl* pending) {
  const char* name = name_of(args);
  require_open(name);
  // With a single lane, a lane that is not there can stand for no other.
  const bool is_there = api::has_lane(context_->config, args.lane);
  Lane& lane = this->lane(is_there ? args.lane : 0);
  std::unique_lock lock(lane.mutex);
  context_->check_abort();
  if (!is_there && lanes_.size() > 1) stop_for_lane(name, args.lane);
  if (device_) return start_on_device(args, lane.index(), pending);
  std::shared_ptr<PendingImpl> made;
  engine::Call* call = nullptr;
  try {
    check_outstanding(context_->config, lane, name);
    if (!pending) pending = (made = new_pending(lane.index())).get();
    call = make_call(made ? lasting(args, *made) : args, lane, *pending);
  } catch (const std::bad_alloc&) {
    refuse(args, lane, std::make_exception_ptr(TransportError(std::string(name) + ": the process has no memory left for the tables of this call")));
  } catch (...) {
    refuse(args, lane, std::current_exception());
  }
  lane.take_epoch();
  lane.drive(*call, Lane::Until::sent);
  if (!made) pending->lock = std::move(lock);
  pending->waited = false;  // until here a call that fails leaves nothing to drop, and the lane is locked
  return made;
}
template std::shared_ptr<PendingImpl> BufferImpl::start(const DispatchArgs&, PendingImpl*);
template std::shared_ptr<PendingImpl> BufferImpl::start(const CombineArgs&, PendingImpl*);

engine::Call* BufferImpl::make_call(const DispatchArgs& args, Lane& lane, PendingImpl& pending) {
  const engine::KnownFacts& known = known_[static_cast<size_t>(lane.index())].dispatch.check(*context_, args, *lane.experts());
  std::shared_ptr<Routing> fresh;
  std::shared_ptr<const Routing> cached;
  if (args.handle) {
    cached = args.handle->routing();
  } else {
    fresh = engine::list_sends(lane.experts(), args.topk_idx, args.topk_weights, args.x.shape[0]);
    if (!fresh) [[unlikely]]
      api::check_ids(args.topk_idx, context_->config.num_experts);  // says which one
    fresh->buffer = context_->serial;
    fresh->id = static_cast<int64_t>(args.lane) << 48 | static_cast<int64_t>(lane.next_epoch());
    fresh->layout = args.layout;
    fresh->capacity = args.capacity.value_or(-1);
    fresh->alignment = args.layout == Layout::expert_major ? args.expert_alignment : 1;
  }
  auto call = std::allocate_shared<engine::DispatchCall>(engine::CachedAllocator<engine::DispatchCall>(), context_, args.lane, lane.next_epoch(),
                                                         lane.first_epoch(), known, args, std::move(fresh), std::move(cached));
  pending.dispatch = call.get();
  if (pending.keeper) pending.call = call;
  lane.add(std::move(call));
  return pending.dispatch;
}

engine::Call* BufferImpl::make_call(const CombineArgs& args, Lane& lane, PendingImpl& pending) {
  const engine::KnownFacts& known = known_[static_cast<size_t>(lane.index())].combine.check(*context_, args);
  auto call = std::allocate_shared<engine::CombineCall>(engine::CachedAllocator<engine::CombineCall>(), context_, args.lane, lane.next_epoch(),
                                                        lane.first_epoch(), known, args, args.handle->routing());
  pending.combine = call.get();
  if (pending.keeper) pending.call = call;
  lane.add(std::move(call));
  return pending.combine;
}

void BufferImpl::receive_meanwhile(const std::shared_ptr<PendingImpl>& pending) {
  PendingImpl* p = pending.get();  // stop_resident() joins before the pending call dies
  const auto receive = [this, p] {
    transport::Window& window = *context_->window;
    transport::Idler idler(window, context_->transport->spin());
    while (!p->stop.load(std::memory_order_acquire) && context_->status.load(std::memory_order_acquire) == 0) {
      {
        Lane& l = lane(p->lane);
        std::lock_guard lock(l.mutex);
        if (p->dispatch->done() || p->dispatch->failure) return;
        if (l.progress_all()) {
          idler.reset();
          continue;
        }
        window.progress();
      }
      while (!idler.step()) {
        // Leaves the lane to others in between.
      }
    }
  };
  try {
    p->resident = std::thread(receive);
  } catch (const std::system_error& e) {
    util::log_once(util::LogLevel::warn,
                   "receive = resident: the system has no thread left (" + e.code().message() + "): rows are received in wait()");
  }
}

void BufferImpl::set_expert_to_rank(const std::vector<int>& expert_to_rank) {
  require_open("set_expert_to_rank");
  if (static_cast<int>(expert_to_rank.size()) != context_->config.num_experts) {
    throw InvalidArgument("set_expert_to_rank: " + std::to_string(expert_to_rank.size()) + " entries, but this Buffer has " +
                          std::to_string(context_->config.num_experts) + " experts");
  }
  auto map = std::make_shared<const core::ExpertMap>(core::ExpertMap::of(expert_to_rank, context_->num_ranks));
  if (device_) device_->set_experts(expert_to_rank);
  std::lock_guard lock(context_->experts_mutex);
  context_->experts = std::move(map);
  context_->num_maps.fetch_add(1, std::memory_order_release);
}

void BufferImpl::check() {
  require_open("check");
  context_->check_abort();
  if (device_) device_->check_failure();
}

void BufferImpl::synchronize() {
  require_open("synchronize");
  for (auto& l : lanes_) {
    std::lock_guard lock(l->mutex);
    l->finish_all();
  }
  require_open("synchronize");
  context_->check_abort();
  if (device_) device_->synchronize();
}

void BufferImpl::recover() {
  require_open("recover");
  std::vector<std::unique_lock<std::mutex>> locks;
  for (auto& l : lanes_) locks.emplace_back(l->mutex);
  struct Recovering {
    std::atomic<bool>& flag;
    explicit Recovering(std::atomic<bool>& f) : flag(f) { flag.store(true, std::memory_order_release); }
    ~Recovering() { flag.store(false, std::memory_order_release); }
  } recovering(recovering_);
  std::lock_guard steps(communicator_->mutex);
  // Everybody has left their calls once all have arrived here; then nobody writes into anybody's arena any more.
  std::vector<uint64_t> mine;
  for (auto& l : lanes_) mine.push_back(l->next_epoch());
  // Handles are told apart by the number of their call, which must be the same on all ranks again.
  for (int64_t calls : device_calls_) mine.push_back(static_cast<uint64_t>(calls));
  const auto all = communicator_->bootstrap->all_gather("recover", std::as_bytes(std::span(mine)));
  for (const auto& bytes : all) {
    for (size_t i = 0; i < mine.size() && bytes.size() == mine.size() * sizeof(uint64_t); ++i) {
      uint64_t theirs = 0;
      std::memcpy(&theirs, bytes.data() + i * sizeof theirs, sizeof theirs);
      mine[i] = std::max(mine[i], theirs);
    }
  }
  for (size_t l = 0; l < lanes_.size(); ++l) lanes_[l]->restart(mine[l]);
  for (size_t l = 0; l < device_calls_.size(); ++l) device_calls_[l] = static_cast<int64_t>(mine[lanes_.size() + l]);
  context_->forget_abort();
  if (device_) device_->recover();
  communicator_->bootstrap->barrier("recovered");
}

void BufferImpl::close() {
  if (!context_->process.is_this() || context_->closed.exchange(true)) return;
  for (auto& l : lanes_) {
    // A call that another thread is in sees that the Buffer is closed and ends; recover() waits for peers and leaves no call behind.
    std::unique_lock lock(l->mutex, std::defer_lock);
    while (!lock.try_lock() && !recovering_.load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (lock.owns_lock()) l->abandon();
  }
  context_->announce_close();
}

BufferImpl::~BufferImpl() {
  close();
  if (!context_->process.is_this()) util::leave_to_parent(context_);
}

}  // namespace internal
}  // namespace v0
}  // namespace turnout
