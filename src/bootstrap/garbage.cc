// Sweeping up after groups that are gone.
#include "bootstrap/garbage.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "bootstrap/step_value.h"
#include "core/bytes.h"

namespace turnout::bootstrap {

namespace {

/// More than a new group adds (its own and that of its transport), and little time where none can be swept: a look takes a millisecond.
constexpr size_t kMostLooks = 4;

/// The last words of all ranks; fewer if somebody has not left.
std::vector<Value> words_of(Store& store, const std::string& prefix, int num_ranks) {
  std::vector<Value> words;
  for (int rank = num_ranks - 1; rank >= 0; --rank) {
    const auto word = store.get(Garbage::word(prefix, rank), std::chrono::milliseconds(1));
    if (!word) break;
    words.insert(words.begin(), unpack(*word));
  }
  return words;
}

void erase(Store& store, const std::string& prefix, const std::vector<Value>& words) {
  for (size_t at = 0; at < words.size(); ++at) {
    const int rank = static_cast<int>(at);
    uint64_t step = 0;
    core::copy_bytes(&step, words[at].bytes.data(), std::min(words[at].bytes.size(), sizeof step));
    if (step > 0) store.erase(step_key(prefix, step, rank));
    if (step > 1 && words[at].kind == Kind::given_up) store.erase(step_key(prefix, step - 1, rank));
    store.erase(Garbage::word(prefix, rank));
  }
}

}  // namespace

void Garbage::sweep(Store& store) noexcept {
  try {
    size_t looks = 0;
    {
      std::lock_guard lock(mutex_);
      looks = std::min(groups_.size(), kMostLooks);
    }
    for (; looks > 0; --looks) {  // without the lock: who destroys a group waits for no store
      Group group;
      {
        std::lock_guard lock(mutex_);
        if (groups_.empty()) return;
        group = std::move(groups_.front());
        groups_.pop_front();
      }
      const std::vector<Value> words = words_of(store, group.prefix, group.num_ranks);
      if (words.size() == static_cast<size_t>(group.num_ranks)) erase(store, group.prefix, words);
      else add(std::move(group.prefix), group.num_ranks);
    }
  } catch (...) {  // what is left stays
  }
}

}  // namespace turnout::bootstrap
