// Threads of one process share one mapping: kernels that reach the same memory through two addresses at once would not be
// promised to see each other's writes (CUDA programming guide, "virtual aliasing"). Processes cannot but map it each for itself.
#include <algorithm>
#include <sstream>

#include "transport/cuda_p2p/cuda_p2p.h"
#include "transport/device/driver.h"
#include "transport/device/probe.h"
#include "transport/device/range.h"
#include "transport/device/shared.h"
#include "transport/mailbox.h"

namespace turnout::transport::device {

namespace {

ProcessTable<Range>& ranges() {
  static ProcessTable<Range> table;
  return table;
}

/// A whole number of the largest granules, so that every rank takes the same.
size_t round_up(size_t num_bytes, const std::vector<RankGpu>& gpus) {
  size_t granule = 1;
  for (const RankGpu& gpu : gpus) granule = std::max(granule, gpu.granularity);
  const size_t wanted = std::max(num_bytes, probe_bytes(static_cast<int>(gpus.size())));
  // A size that no GPU can have stays one, and is refused by the driver.
  return wanted > SIZE_MAX - granule ? SIZE_MAX / granule * granule : (wanted + granule - 1) / granule * granule;
}

class VmmWindow final : public WindowBase {
 public:
  VmmWindow(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes)
      : WindowBase(bootstrap, gpus, num_bytes), mapped_bytes_(round_up(num_bytes, gpus)), ranges_(gpus.size()) {
    fill("cuda_p2p: open");
  }

  std::string_view transport() const override { return "cuda_p2p"; }
  DeviceLink link(int rank) const override { return link_by_gpu(rank); }

  void suspend() override {
    if (is_suspended_) throw InvalidArgument("device window: suspend() of a window that is suspended already");
    bootstrap_.barrier("cuda_p2p: suspend: quiet");
    empty();
    is_suspended_ = true;
    bootstrap_.barrier("cuda_p2p: suspend: freed");
  }

  void resume() override {
    if (!is_suspended_) throw InvalidArgument("device window: resume() of a window that is not suspended");
    try {
      fill("cuda_p2p: resume");
    } catch (...) {
      empty();
      throw;
    }
    is_suspended_ = false;
  }

 private:
  /// Fresh memory behind every range. Ranges are made once, so addresses stay.
  void fill(const std::string& step) {
    Descriptor file;
    Mailbox mailbox;
    const auto made = tell_all(bootstrap_, step + ": memory", std::to_string(mapped_bytes_) + " bytes", [&] { return make_own(file, mailbox); });
    require_agreed(made, rank_, step + ": memory");
    const auto taken = tell_all(bootstrap_, step + ": taken", "", [&] {
      take_others(made, file, mailbox);
      return std::string();
    });
    require_agreed(taken, rank_, step + ": taken");
    probe(bootstrap_, step, addresses_, mine().device);
  }

  /// This rank's memory, zero; returns its number in this process and the name of its mailbox.
  std::string make_own(Descriptor& file, Mailbox& mailbox) {
    const CurrentDevice current(mine().device);
    range(static_cast<size_t>(rank_)).attach(Allocation::make(mine().device, mapped_bytes_, has_strangers()), devices_of_this_process());
    const auto& own = ranges_[static_cast<size_t>(rank_)];
    clear(mine().device, own->address(), mapped_bytes_);
    std::string words = ranges().publish(own);
    if (has_strangers()) {
      Descriptor shared = own->allocation().share();
      mailbox.open();
      words += " " + mailbox.name();
      file = std::move(shared);
    }
    return words;
  }

  void take_others(const std::vector<Said>& made, const Descriptor& file, Mailbox& mailbox) {
    const CurrentDevice current(mine().device);
    std::vector<std::string> names;
    for (size_t rank = 0; rank < made.size(); ++rank) {
      std::istringstream words(made[rank].made);
      std::string number, name;
      words >> number >> name;
      names.push_back(name);
      if (!in_this_process(rank) || static_cast<int>(rank) == rank_) continue;
      ranges_[rank] = ranges().find(number, static_cast<int>(rank));
      addresses_[rank] = ranges_[rank]->address();
    }
    if (!has_strangers()) return;
    mailbox.exchange(names, rank_, file, [&](int peer, const Descriptor& theirs, int) {
      if (in_this_process(static_cast<size_t>(peer))) return;
      range(static_cast<size_t>(peer)).attach(Allocation::import(theirs, peer), {mine().device});
    });
  }

  /// The range for this rank's memory or that of a rank in another process.
  Range& range(size_t rank) {
    if (!ranges_[rank]) {
      size_t granule = 0;
      for (const RankGpu& gpu : gpus_) granule = std::max(granule, gpu.granularity);
      ranges_[rank] = std::make_shared<Range>(mapped_bytes_, granule);
      addresses_[rank] = ranges_[rank]->address();
    }
    return *ranges_[rank];
  }

  /// Ranges of other ranks of this process are theirs to empty.
  void empty() {
    for (size_t rank = 0; rank < ranges_.size(); ++rank) {
      if (ranges_[rank] && (static_cast<int>(rank) == rank_ || !in_this_process(rank))) ranges_[rank]->detach();
    }
  }

  const size_t mapped_bytes_;
  std::vector<std::shared_ptr<Range>> ranges_;
  bool is_suspended_ = false;
};

}  // namespace

std::unique_ptr<DeviceWindow> open_vmm(Bootstrap& bootstrap, const std::vector<RankGpu>& gpus, size_t num_bytes) {
  return std::make_unique<VmmWindow>(bootstrap, gpus, num_bytes);
}

}  // namespace turnout::transport::device
