// One kernel of one thread per peer: a window is opened rarely.
#include <cstdint>
#include <string>

#include "transport/agree.h"
#include "transport/device/driver.h"
#include "transport/device/probe.h"
#include "transport/device/resources.h"

namespace turnout::transport::device {

namespace {

/// The word that `writer` puts into the memory of `owner`: never zero, and no two alike.
uint64_t word_of(size_t writer, size_t owner) { return 0x7475'726e'0000'0000 | writer << 16 | owner; }

/// One thread: stores past every cache that is this GPU's alone, and loads from where it stored.
__global__ void store_and_load(uint64_t* word, uint64_t value, uint64_t* seen) {
  *static_cast<volatile uint64_t*>(word) = value;
  __threadfence_system();
  *seen = *static_cast<volatile uint64_t*>(word);
}

void read(void* to, const void* from, size_t num_bytes, cudaStream_t stream, const std::string& what) {
  check(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream), what);
  check(cudaStreamSynchronize(stream), what);
}

std::string text_of(uint64_t word) {
  char text[17] = {};
  for (int i = 15; i >= 0; --i, word >>= 4) text[i] = "0123456789abcdef"[word & 15];
  return text;
}

void write_to_peers(const std::vector<std::byte*>& memory, size_t rank, cudaStream_t stream) {
  // The first half of the probed bytes is for what others write, the second for what this rank loads.
  uint64_t* const seen = reinterpret_cast<uint64_t*>(memory[rank]) + memory.size();
  for (size_t peer = 0; peer < memory.size(); ++peer) {
    const std::string what = "writing to the memory of rank " + std::to_string(peer);
    const uint64_t value = word_of(rank, peer);
    uint64_t found = 0;
    store_and_load<<<1, 1, 0, stream>>>(reinterpret_cast<uint64_t*>(memory[peer]) + rank, value, seen + peer);
    check(cudaGetLastError(), what);
    check(cudaStreamSynchronize(stream), what);
    read(&found, seen + peer, sizeof found, stream, what);
    if (found != value) throw TransportError("cuda: " + what + ": stored " + text_of(value) + " and loaded " + text_of(found));
  }
}

void find_in_own(const std::vector<std::byte*>& memory, size_t rank, int device) {
  std::vector<uint64_t> found(memory.size());
  read(found.data(), memory[rank], found.size() * sizeof(uint64_t), side_stream(device), "reading what peers wrote");
  for (size_t writer = 0; writer < found.size(); ++writer) {
    if (found[writer] == word_of(writer, rank)) continue;
    throw TransportError("cuda: rank " + std::to_string(writer) + " stored " + text_of(word_of(writer, rank)) + " into the memory of rank " +
                         std::to_string(rank) + ", which found " + text_of(found[writer]) + ": their mappings are not of the same memory");
  }
  clear(device, memory[rank], probe_bytes(static_cast<int>(memory.size())));
}

}  // namespace

void probe(Bootstrap& bootstrap, std::string_view step, const std::vector<std::byte*>& memory, int device) {
  const auto rank = static_cast<size_t>(bootstrap.rank());
  const std::string first = std::string(step) + ": written", second = std::string(step) + ": found";
  const auto written = tell_all(bootstrap, first, "", [&] {
    const CurrentDevice current(device);
    const auto held = hold_side_streams();
    write_to_peers(memory, rank, side_stream(device));
    return std::string();
  });
  check_agreed(written, bootstrap.rank(), first);
  const auto found = tell_all(bootstrap, second, "", [&] {
    const CurrentDevice current(device);
    const auto held = hold_side_streams();
    find_in_own(memory, rank, device);
    return std::string();
  });
  check_agreed(found, bootstrap.rank(), second);
}

}  // namespace turnout::transport::device
