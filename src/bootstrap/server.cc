// A connection is a stranger until it has proven the secret: few bytes, little time, a bounded number of them.
#include "bootstrap/server.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "turnout/error.h"
#include "util/log.h"

namespace turnout::bootstrap {

namespace {

constexpr size_t kMostStrangers = 256;
constexpr size_t kMostNotes = 64;
/// A member that does not read its answers is not read from either.
constexpr size_t kMostUnread = 4 * kMostBody;

}  // namespace

Server::Server(std::vector<Fd> listeners, ServerOptions options)
    : listeners_(std::move(listeners)), options_(std::move(options)), wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_) throw TransportError(std::string("eventfd: ") + std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& e) {
    throw TransportError("rank 0 cannot start the thread that serves the rendezvous: " + e.code().message() +
                         "; raise the limit of threads (ulimit -u)");
  }
}

Server::~Server() {
  if (!process_.is_this()) {  // it serves in the parent
    util::leave_to_parent(thread_);
    return;
  }
  stop_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof one);
  thread_.join();
}

std::string Server::refusals() const {
  std::lock_guard lock(notes_mutex_);
  std::string text;
  for (const auto& [address, reasons] : notes_) {
    for (const std::string& why : reasons) text.append("\n  refused ").append(address).append(": ").append(why);
  }
  return text;
}

std::string Server::contradiction() const {
  std::lock_guard lock(notes_mutex_);
  return contradiction_;
}

void Server::note(const Connection& c, const std::string& why) {
  const std::string address = c.peer.host();
  {
    std::lock_guard lock(notes_mutex_);
    if (notes_.size() >= kMostNotes) return;
    std::set<std::string>& reasons = notes_[address];
    const bool news = reasons.size() < kMostNotes && reasons.insert(why).second;
    if (!news || reasons.size() > 1) return;
  }
  util::log(util::LogLevel::warn, "rendezvous: refused " + address + ": " + why + " (said once per address)");
}

void Server::loop() {
  std::vector<pollfd> polled;
  while (!stop_) {
    const auto now = Clock::now();
    const size_t num_listeners = now < accept_again_ ? 0 : listeners_.size();
    polled.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
    for (size_t i = 0; i < num_listeners; ++i) polled.push_back({.fd = listeners_[i].get(), .events = POLLIN, .revents = 0});
    for (const Connection& c : connections_) {
      const size_t unread = c.out.size() - c.num_written;
      const int events = (unread > 0 ? POLLOUT : 0) | (unread < kMostUnread ? POLLIN : 0);
      polled.push_back({.fd = c.fd.get(), .events = static_cast<short>(events), .revents = 0});
    }
    poll(polled.data(), polled.size(), poll_timeout_ms(now));
    size_t at = 1 + num_listeners;
    for (Connection& c : connections_) {
      const short events = polled[at++].revents;
      if (events & POLLOUT) flush(c);
      if (events & (POLLIN | POLLHUP | POLLERR)) read_from(c);
    }
    // New connections last: those above are what `polled` knows.
    for (size_t i = 0; i < num_listeners && i < listeners_.size(); ++i) {
      if (polled[1 + i].revents) accept_from(listeners_[i]);
    }
    expire(Clock::now());
    bury_dead();
  }
  say_farewell();
}

int Server::poll_timeout_ms(Clock::time_point now) const {
  auto next = now + std::chrono::hours(1);
  for (const Connection& c : connections_) {
    if (c.state != Connection::State::member) next = std::min(next, c.deadline);
  }
  for (const auto& [key, waiting] : waiting_) next = std::min(next, waiting.deadline);
  if (accept_again_ > now) next = std::min(next, accept_again_);
  return static_cast<int>(std::max<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(next - now).count(), 0));
}

void Server::accept_from(const Fd& listener) {
  for (;;) {
    Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    auto stranger = [](const Connection& c) { return !c.dead && c.state != Connection::State::member; };
    if (!fd) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      accept_again_ = Clock::now() + std::chrono::milliseconds(50);  // out of descriptors or memory: strangers' will come free
      return;
    }
    if (static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), stranger)) >= kMostStrangers) {
      drop(*std::find_if(connections_.begin(), connections_.end(), stranger), "too many connections that have not proven the secret");
    }
    Connection& c = connections_.emplace_back();
    c.peer = peer_address(fd.get());
    send_at_once(fd.get());
    c.fd = std::move(fd);
    c.deadline = Clock::now() + options_.stranger_time;
  }
}

void Server::read_from(Connection& c) {
  std::byte buffer[64 * 1024];
  while (!c.dead) {
    const ssize_t n = recv(c.fd.get(), buffer, sizeof buffer, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      if (c.state == Connection::State::hello || c.state == Connection::State::proof) note(c, "left without proving the secret");
      c.dead = true;
      return;
    }
    c.in.insert(c.in.end(), buffer, buffer + n);
    handle_input(c);
    if (static_cast<size_t>(n) < sizeof buffer) return;  // one rank's large value must not keep the others waiting
  }
}

void Server::handle_input(Connection& c) {
  size_t used = 0;
  while (!c.dead && c.state != Connection::State::closing) {
    const Parsed frame = parse(Bytes(c.in).subspan(used), c.state == Connection::State::member);
    if (frame.status == Parsed::Status::incomplete) break;
    if (frame.status == Parsed::Status::bad) {
      drop(c, std::string("sent what is not of this protocol: ") + frame.reason);
      break;
    }
    used += frame.num_bytes;
    handle(c, frame);
  }
  if (c.state == Connection::State::closing) used = c.in.size();  // nothing more is of interest
  c.in.erase(c.in.begin(), c.in.begin() + static_cast<ptrdiff_t>(used));
}

void Server::handle(Connection& c, const Parsed& frame) {
  const Message& m = frame.message;
  if (c.state == Connection::State::hello) {
    return m.type == MessageType::hello ? challenge(c, m) : drop(c, "did not begin with hello");
  }
  if (c.state == Connection::State::proof) {
    return m.type == MessageType::proof ? admit(c, m) : drop(c, "did not answer the challenge");
  }
  if (!c.session->open(frame)) return drop(c, "sent a message that was altered or repeated on its way");
  switch (m.type) {
    case MessageType::set: return store(m.key, m.value);
    case MessageType::erase:
      if (const auto it = values_.find(m.key); it != values_.end()) values_.erase(it);
      return;
    case MessageType::get:
      if (const auto it = values_.find(m.key); it != values_.end()) {
        Message answer{.type = MessageType::value, .id = m.id, .value = it->second};
        return send(c, c.session->seal(answer));
      }
      waiting_.emplace(std::string(m.key), Waiting{&c, m.id, Clock::now() + std::chrono::milliseconds(m.timeout_ms)});
      return;
    default: return drop(c, "sent a message that only rank 0 sends");
  }
}

void Server::challenge(Connection& c, const Message& hello) {
  if (hello.version != kProtocolVersion) {
    return refuse(c, Refusal::version,
                  "rank 0 speaks version " + std::to_string(kProtocolVersion) + " of the rendezvous, not " + std::to_string(hello.version));
  }
  const Digest nonce = random_digest();
  c.rank = hello.rank;
  c.num_ranks = hello.num_ranks;
  c.session.emplace(Session::Side::server, bytes_of(options_.secret), hello.nonce, nonce, hello.rank, hello.num_ranks);
  c.state = Connection::State::proof;
  send(c, encode({.type = MessageType::challenge, .nonce = nonce}));
}

void Server::admit(Connection& c, const Message& proof) {
  if (!c.session->accepts(proof.nonce)) return refuse(c, Refusal::secret, "the secret is another one");
  // From here on the words of the other side are those of a rank of this job.
  const std::string rank = "rank " + std::to_string(c.rank);
  if (c.num_ranks != static_cast<uint32_t>(options_.num_ranks)) {
    const std::string words = "ranks disagree about their number: " + rank + " counts " + std::to_string(c.num_ranks) + " ranks, rank 0 counts " +
                              std::to_string(options_.num_ranks);
    {
      std::lock_guard lock(notes_mutex_);
      contradiction_ = words;
    }
    return refuse(c, Refusal::num_ranks, words);
  }
  if (c.rank >= c.num_ranks) return refuse(c, Refusal::rank_range, rank + " of " + std::to_string(c.num_ranks) + " ranks");
  if (!joined_.insert(c.rank).second) return refuse(c, Refusal::rank_taken, rank + " has joined already: two processes were given the same rank");
  send(c, encode({.type = MessageType::proof, .nonce = c.session->my_proof()}));
  c.state = Connection::State::member;
  if (joined_.size() < static_cast<size_t>(options_.num_ranks)) return;
  listeners_.clear();  // nobody else has business here, and the port is free again
  for (Connection& other : connections_) {
    if (other.state != Connection::State::member) other.dead = true;
  }
  if (options_.on_all_joined) options_.on_all_joined();
}

void Server::store(std::string_view key, Bytes value) {
  const auto it = values_.insert_or_assign(std::string(key), std::vector<std::byte>(value.begin(), value.end())).first;
  const auto [first, last] = waiting_.equal_range(key);
  for (auto w = first; w != last; ++w) {
    Message answer{.type = MessageType::value, .id = w->second.id, .value = it->second};
    send(*w->second.from, w->second.from->session->seal(answer));
  }
  waiting_.erase(first, last);
}

void Server::refuse(Connection& c, Refusal refusal, const std::string& text) {
  note(c, text);
  send(c, encode({.type = MessageType::refused, .refusal = refusal, .value = bytes_of(text)}));
  c.state = Connection::State::closing;  // until the answer is read, or the deadline of strangers
}

void Server::drop(Connection& c, const std::string& why) {
  note(c, why);
  c.dead = true;
}

void Server::send(Connection& c, std::vector<std::byte> frame) {
  if (c.dead) return;
  if (c.num_written == c.out.size()) {
    c.out = std::move(frame);
    c.num_written = 0;
  } else {
    c.out.insert(c.out.end(), frame.begin(), frame.end());
  }
  flush(c);
}

void Server::flush(Connection& c) {
  while (!c.dead && c.num_written < c.out.size()) {
    const ssize_t n = ::send(c.fd.get(), c.out.data() + c.num_written, c.out.size() - c.num_written, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n < 0) {
      c.dead = true;
    } else {
      c.num_written += static_cast<size_t>(n);
    }
  }
}

void Server::expire(Clock::time_point now) {
  for (Connection& c : connections_) {
    if (c.state == Connection::State::member || c.dead || now < c.deadline) continue;
    if (c.state != Connection::State::closing) note(c, "did not prove the secret in time");
    c.dead = true;
  }
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second.deadline > now) {
      ++it;
      continue;
    }
    Connection& c = *it->second.from;
    send(c, c.session->seal({.type = MessageType::absent, .id = it->second.id}));
    it = waiting_.erase(it);
  }
}

void Server::bury_dead() {
  for (const Connection& c : connections_) {
    if (!c.dead) continue;
    std::erase_if(waiting_, [&](const auto& w) { return w.second.from == &c; });
    // While the job forms, the place of a rank that left is free again.
    if (c.state == Connection::State::member) joined_.erase(c.rank);
  }
  connections_.remove_if([](const Connection& c) { return c.dead; });
}

/// Rank 0 may be done with a step that others are still reading: they keep what the store holds now.
void Server::say_farewell() {
  listeners_.clear();
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  // What has been sent comes first: all of rank 0's own, whose connection is closed already, and what is there of the others'.
  for (Connection& c : connections_) {
    if (c.state != Connection::State::member) continue;
    while (!c.dead && Clock::now() < deadline && wait_for(c.fd.get(), POLLIN, c.rank == 0 ? deadline : Clock::now())) read_from(c);
  }
  for (Connection& c : connections_) {
    if (c.state != Connection::State::member) continue;
    for (const auto& [key, value] : values_) send(c, c.session->seal({.type = MessageType::set, .key = key, .value = value}));
  }
  auto unsent = [this](Connection& c) {
    flush(c);
    pollfd p{.fd = c.fd.get(), .events = 0, .revents = 0};
    if (c.dead || (poll(&p, 1, 0) > 0 && (p.revents & (POLLERR | POLLHUP)))) return false;
    // Closing drops what has not left yet. Between machines, what was not acknowledged may be lost too, and then our reset
    // would overtake the second attempt.
    int queued = 0;
    ioctl(c.fd.get(), c.peer.is_loopback() ? SIOCOUTQNSD : SIOCOUTQ, &queued);
    return c.num_written < c.out.size() || queued > 0;
  };
  while (Clock::now() < deadline && std::any_of(connections_.begin(), connections_.end(), unsent)) {
    poll(nullptr, 0, 1);
  }
  connections_.clear();
}

}  // namespace turnout::bootstrap
