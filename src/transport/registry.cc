// The choice is made from facts that every rank has gathered from every rank, so all come to the same one.
#include "transport/registry.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "transport/doorbell.h"
#include "transport/inproc/inproc.h"
#include "transport/shm/shm.h"
#include "util/env.h"

namespace turnout::transport {

namespace {

RankPlace my_place() {
  RankPlace place;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> place.boot_id;
  place.pid = getpid();
  place.uid = getuid();
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) == 0) place.pid_namespace = info.st_ino;
  return place;
}

std::string pack(const RankPlace& place, const TransportRequest& request) {
  return place.boot_id + '\n' + std::to_string(place.pid) + '\n' + std::to_string(place.uid) + '\n' + std::to_string(place.pid_namespace) + '\n' +
         request.name + '\n' + std::to_string(request.scheduler_seed);
}

std::vector<std::string> lines(const std::vector<std::byte>& bytes) {
  std::vector<std::string> out(1);
  for (std::byte b : bytes) {
    if (static_cast<char>(b) == '\n') out.emplace_back();
    else out.back() += static_cast<char>(b);
  }
  out.resize(6);
  return out;
}

}  // namespace

std::chrono::nanoseconds spin_time(int ranks_on_machine) {
  if (util::env().spin_us) return std::chrono::microseconds(*util::env().spin_us);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  // Spinning takes the core from the very rank that is waited for once ranks outnumber cores.
  return ranks_on_machine > usable ? std::chrono::microseconds(2) : std::chrono::microseconds(50);
}

std::vector<std::string> transport_names() { return {"inproc", "shm"}; }

std::string unavailable_reason(const std::string& name, const std::vector<RankPlace>& places) {
  const RankPlace& first = places.front();
  for (size_t rank = 1; rank < places.size(); ++rank) {
    const RankPlace& other = places[rank];
    if (other.boot_id != first.boot_id) return name + " needs all ranks on one machine, but rank " + std::to_string(rank) + " and rank 0 run under different kernels";
    if (name == "inproc" && other.pid != first.pid) return "inproc needs ranks that are threads of one process, but rank " + std::to_string(rank) + " is another process";
    if (name == "shm" && other.uid != first.uid) {
      return "shm is private to a user, but rank " + std::to_string(rank) + " runs as uid " + std::to_string(other.uid) + " and rank 0 as " + std::to_string(first.uid);
    }
  }
  return "";
}

std::shared_ptr<Transport> make_transport(const TransportRequest& request) {
  const std::string mine = pack(my_place(), request);
  const auto all = request.bootstrap.all_gather("transport: places", std::as_bytes(std::span(mine.data(), mine.size())));
  std::vector<RankPlace> places;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto fields = lines(all[rank]);
    places.push_back({fields[0], std::atoll(fields[1].c_str()), std::atoll(fields[2].c_str()), std::strtoull(fields[3].c_str(), nullptr, 10)});
    if (fields[4] != request.name || fields[5] != std::to_string(request.scheduler_seed)) {
      throw InvalidArgument("ranks disagree about the transport: rank " + std::to_string(rank) + " asks for '" + fields[4] + "' (seed " + fields[5] +
                            "), rank " + std::to_string(request.bootstrap.rank()) + " for '" + request.name + "' (seed " +
                            std::to_string(request.scheduler_seed) + ")");
    }
  }
  std::string name = request.name;
  if (name == "auto") name = util::env().transport;
  if (name == "auto") {
    std::string reasons;
    for (const std::string& candidate : transport_names()) {
      const std::string reason = unavailable_reason(candidate, places);
      if (reason.empty()) {
        name = candidate;
        break;
      }
      reasons += "\n  " + reason;
    }
    if (name == "auto") throw TransportError("no transport reaches all ranks:" + reasons);
  } else {
    const auto known = transport_names();
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw InvalidArgument("transport '" + name + "' is unknown; there are auto, inproc and shm");
    }
    if (const std::string reason = unavailable_reason(name, places); !reason.empty()) throw TransportError("transport " + name + " cannot be had: " + reason);
  }
  if (request.scheduler_seed != 0 && name != "inproc") throw InvalidArgument("scheduler_seed needs transport inproc, not " + name);
  if (name == "inproc") return make_inproc(request.bootstrap, request.scheduler_seed);
  return make_shm(request.bootstrap);
}

}  // namespace turnout::transport
