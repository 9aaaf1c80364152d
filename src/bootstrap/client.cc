// Rank 0's goodbye matters: it hands out what it holds and closes, perhaps while others are still in the step it has left.
// So a request that finds the connection closed reads to its end first and looks there.
#include "bootstrap/client.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

namespace turnout::bootstrap {

namespace {

/// A rank 0 that lives answers every request; beyond the request's own time it has this long.
constexpr auto kSlack = std::chrono::seconds(2);
constexpr auto kSendTime = std::chrono::seconds(30);

}  // namespace

bool Channel::write(const std::vector<std::byte>& frame, Clock::time_point deadline) {
  size_t done = 0;
  while (done < frame.size()) {
    const ssize_t n = send(fd_.get(), frame.data() + done, frame.size() - done, MSG_NOSIGNAL);
    if (n >= 0) {
      done += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd_.get(), POLLOUT, deadline)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

Channel::Outcome Channel::read(bool proven, Clock::time_point deadline, Parsed& frame) {
  in_.erase(in_.begin(), in_.begin() + static_cast<ptrdiff_t>(used_));
  used_ = 0;
  for (;;) {
    frame = parse(in_, proven);
    if (frame.status == Parsed::Status::bad) return Outcome::malformed;
    if (frame.status == Parsed::Status::ok) {
      used_ = frame.num_bytes;
      return Outcome::frame;
    }
    if (!wait_for(fd_.get(), POLLIN, deadline)) return Outcome::late;
    std::byte buffer[64 * 1024];
    const ssize_t n = recv(fd_.get(), buffer, sizeof buffer, 0);
    if (n > 0) {
      in_.insert(in_.end(), buffer, buffer + n);
    } else if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) {
      return Outcome::gone;
    }
  }
}

Handshake shake_hands(Channel& channel, const std::string& secret, uint32_t rank, uint32_t num_ranks, Clock::time_point deadline) {
  Handshake result;
  auto expect = [&](MessageType type, Parsed& frame) {
    switch (channel.read(false, deadline, frame)) {
      case Channel::Outcome::late: result.error = "no answer in time"; return false;
      case Channel::Outcome::gone: result.error = "closed the connection"; return false;
      case Channel::Outcome::malformed: result.error = "what answers does not speak this protocol"; return false;
      case Channel::Outcome::frame: break;
    }
    if (frame.message.type == type) return true;
    if (frame.message.type == MessageType::refused) {
      result.refusal = frame.message.refusal;
      result.error = "refused: ";
      for (std::byte b : frame.message.value) {  // not proven yet: nothing but plain text gets into our messages
        const char c = static_cast<char>(b);
        result.error += c >= ' ' && c <= '~' ? c : '?';
      }
    } else {
      result.error = "answers out of turn";
    }
    return false;
  };

  const Digest nonce = random_digest();
  Message hello{.type = MessageType::hello, .version = kProtocolVersion, .rank = rank, .num_ranks = num_ranks, .nonce = nonce};
  channel.write(encode(hello), deadline);
  Parsed frame;
  if (!expect(MessageType::challenge, frame)) return result;
  Session session(Session::Side::client, bytes_of(secret), nonce, frame.message.nonce, rank, num_ranks);
  channel.write(encode({.type = MessageType::proof, .nonce = session.my_proof()}), deadline);
  if (!expect(MessageType::proof, frame)) return result;
  if (!session.accepts(frame.message.nonce)) {
    result.error = "what answers does not know the secret either";
    result.refusal = Refusal::secret;
    return result;
  }
  result.session.emplace(std::move(session));
  return result;
}

RemoteStore::RemoteStore(Channel channel, Session session, int rank, std::string where)
    : rank_(rank), where_(std::move(where)), session_(std::move(session)), channel_(std::move(channel)) {}

bool RemoteStore::send(const Message& message, Clock::time_point deadline) {
  std::lock_guard lock(send_mutex_);
  if (!broken_) broken_ = !channel_.write(session_.seal(message), deadline);
  return !broken_;
}

void RemoteStore::set(const std::string& key, std::span<const std::byte> value) {
  if (key.empty() || key.size() > kMostKeyBytes) {
    throw InvalidArgument("store: a key has " + std::to_string(key.size()) + " bytes, but must have 1 to " + std::to_string(kMostKeyBytes));
  }
  if (value.size() > kMostValueBytes) {
    throw InvalidArgument("store: the value of " + key + " has " + std::to_string(value.size()) + " bytes, more than " +
                          std::to_string(kMostValueBytes));
  }
  if (!send({.type = MessageType::set, .key = key, .value = value}, Clock::now() + kSendTime)) fail("the connection is closed");
}

void RemoteStore::erase(const std::string& key) {
  send({.type = MessageType::erase, .key = key}, Clock::now() + kSendTime);  // a store that is gone holds nothing
}

std::optional<std::vector<std::byte>> RemoteStore::get(const std::string& key, std::chrono::milliseconds timeout) {
  if (key.empty() || key.size() > kMostKeyBytes) {
    throw InvalidArgument("store: a key has " + std::to_string(key.size()) + " bytes, but must have 1 to " + std::to_string(kMostKeyBytes));
  }
  const auto wait = std::clamp<int64_t>(timeout.count(), 0, UINT32_MAX);
  const auto deadline = Clock::now() + std::chrono::milliseconds(wait) + kSlack;
  std::unique_lock lock(mutex_);
  const uint64_t id = next_id_++;
  lock.unlock();
  send({.type = MessageType::get, .id = id, .timeout_ms = static_cast<uint32_t>(wait), .key = key}, deadline);
  lock.lock();
  for (;;) {
    if (auto answer = answers_.extract(id)) return std::move(answer.mapped());
    if (!gone_.empty()) {
      const auto it = farewell_.find(key);
      if (it == farewell_.end()) fail(gone_);
      return it->second;
    }
    if (Clock::now() >= deadline) {
      WaitRecord record{
          .rank = rank_, .peers = {0}, .call = "bootstrap", .epoch = id, .phase = "store", .expected = 1, .seen = 0, .peer_state = "silent"};
      throw PeerTimeout("the store of rank 0 (" + where_ + ") has not answered rank " + std::to_string(rank_) + " for " + std::to_string(wait) +
                            " ms and 2 s more: is its process stopped? is the network to its host cut?",
                        record);
    }
    if (reading_) {
      progress_.wait_until(lock, deadline);
    } else {
      read_one(lock, deadline);
    }
  }
}

/// Reads one message for whoever waits for it.
void RemoteStore::read_one(std::unique_lock<std::mutex>& lock, Clock::time_point deadline) {
  reading_ = true;
  lock.unlock();
  Parsed frame;
  const auto outcome = channel_.read(true, deadline, frame);
  const bool good = outcome == Channel::Outcome::frame && session_.open(frame);
  lock.lock();
  reading_ = false;
  const Message& m = frame.message;
  if (outcome == Channel::Outcome::gone) {
    gone_ = "its process has ended or has closed its Communicator";
  } else if (outcome != Channel::Outcome::late && !good) {
    gone_ = "a message was altered on its way";
  } else if (good && m.type == MessageType::value) {
    answers_[m.id] = std::vector<std::byte>(m.value.begin(), m.value.end());
  } else if (good && m.type == MessageType::absent) {
    answers_[m.id] = std::nullopt;
  } else if (good && m.type == MessageType::set) {
    farewell_.insert_or_assign(std::string(m.key), std::vector<std::byte>(m.value.begin(), m.value.end()));
  }
  progress_.notify_all();
}

void RemoteStore::fail(const std::string& why) const {
  throw TransportError("rank 0, which serves the store at " + where_ + ", cannot be reached any more by rank " + std::to_string(rank_) + ": " + why);
}

}  // namespace turnout::bootstrap
