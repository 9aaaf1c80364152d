// Memory files are anonymous and sealed. Owners and mappings only; how files travel is mailbox.cc.
#include "transport/descriptor.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "transport/agree.h"
#include "transport/mailbox.h"

namespace turnout::transport {

namespace {
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr unsigned kNoExec = 0x0008U;  // MFD_NOEXEC_SEAL, which older headers lack

std::string now(__rlimit_resource resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0) return "now unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "now unlimited" : "now " + std::to_string(limit.rlim_cur);
}

/// Kernels since 6.3 may demand that memory files are never run (vm.memfd_noexec); older ones do not know the flag.
int create(const std::string& name) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  const auto fd = static_cast<int>(syscall(SYS_memfd_create, name.c_str(), kFlags | kNoExec));
  return fd < 0 && errno == EINVAL ? static_cast<int>(syscall(SYS_memfd_create, name.c_str(), kFlags)) : fd;
}

/// Beyond the limit of file sizes the kernel does not only refuse: its SIGXFSZ would end the process.
int resize(const Descriptor& file, size_t num_bytes) {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && num_bytes > limit.rlim_cur) {
    errno = EFBIG;
    return -1;
  }
  return ftruncate(file.get(), static_cast<off_t>(num_bytes));
}

/// The kernel may add seals of its own (against running the file), which do not matter here.
bool is_sealed(const Descriptor& file) {
  const int seals = fcntl(file.get(), F_GET_SEALS);
  return seals >= 0 && (seals & kSeals) == kSeals;
}
}  // namespace

void fail(const std::string& what, int error) {
  std::string text = "shm: " + what + ": " + std::strerror(error);
  if (error == EMFILE || error == ENFILE) {
    text += "; a transport keeps one descriptor per peer and one more, and opening a window takes three: raise the limit of open files (ulimit -n, " +
            now(RLIMIT_NOFILE) + ")";
  }
  if (error == ENOMEM || error == ENOSPC) {
    text += "; free memory, raise the limit of address space (ulimit -v, " + now(RLIMIT_AS) +
            " bytes) or of mappings (vm.max_map_count), or make the Buffer smaller (receive_bytes, max_tokens_per_rank)";
  }
  if (error == EFBIG || error == EINVAL) {
    text += "; make the Buffer smaller, or raise the limit of file sizes (ulimit -f, " + now(RLIMIT_FSIZE) + " bytes)";
  }
  throw TransportError(text);
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Mapping::Mapping(const Descriptor& file, size_t num_bytes) : num_bytes_(num_bytes) {
  data_ = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    fail("cannot map " + std::to_string(num_bytes) + " bytes", errno);
  }
  madvise(data_, num_bytes, MADV_HUGEPAGE);
}

Mapping::~Mapping() {
  if (data_) munmap(data_, num_bytes_);
}

Descriptor make_memory_file(std::string_view label, size_t num_bytes) {
  // The name only helps who reads /proc; the kernel takes at most 249 characters.
  const std::string name = "turnout-" + std::string(label.substr(0, 200));
  Descriptor file(create(name));
  if (!file) fail("cannot make a memory file", errno);
  // Nobody finds it but through /proc of its holders, which is their user's alone; should that ever be open to others, the file is not.
  if (fchmod(file.get(), 0600) != 0) fail("cannot keep a memory file to this user", errno);
  if (resize(file, num_bytes) != 0) fail("cannot size a memory file to " + std::to_string(num_bytes) + " bytes", errno);
  if (fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) fail("cannot seal a memory file", errno);
  return file;
}

std::vector<PeerMemory> share_memory(Bootstrap& bootstrap, std::string_view label, const std::string& facts, size_t num_bytes,
                                     const std::function<void(std::byte*)>& construct) {
  const std::string step = "shm: " + std::string(label);
  const auto rank = static_cast<size_t>(bootstrap.rank());
  std::vector<PeerMemory> memory(static_cast<size_t>(bootstrap.num_ranks()));
  Descriptor mine;
  Mailbox mailbox;
  const auto said = tell_all(bootstrap, step, facts, [&] {
    Descriptor file = make_memory_file(label, num_bytes);
    memory[rank] = {Mapping(file, num_bytes), getpid()};
    construct(memory[rank].map.data());
    mailbox.open();
    mine = std::move(file);  // only now: a rank that refuses has closed it, and the bootstrap may need the descriptor to tell
    return mailbox.name();
  });
  check_agreed(said, bootstrap.rank(), step);

  const auto taken = tell_all(bootstrap, step + ": taken", "", [&] {
    std::vector<std::string> names;
    for (const Said& peer : said) names.push_back(peer.made);
    mailbox.exchange(names, bootstrap.rank(), mine, [&](int peer, const Descriptor& file, int pid) {
      struct stat info {};
      const bool ours = fstat(file.get(), &info) == 0 && info.st_size == static_cast<off_t>(num_bytes) && is_sealed(file);
      if (!ours)
        throw TransportError("shm: the memory file of rank " + std::to_string(peer) + " is not sealed at " + std::to_string(num_bytes) + " bytes");
      memory[static_cast<size_t>(peer)] = {Mapping(file, num_bytes), pid};
    });
    return std::string();
  });
  check_agreed(taken, bootstrap.rank(), step);
  return memory;
}

}  // namespace turnout::transport
