// The choice is made from facts that every rank has gathered from every rank, so all come to the same one.
#include "transport/registry.h"

#include <sched.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "transport/agree.h"
#include "transport/doorbell.h"
#include "transport/inproc/inproc.h"
#include "transport/shm/shm.h"
#include "util/env.h"

namespace turnout::transport {

namespace {

uint64_t namespace_of(const char* path) {
  struct stat info {};
  return stat(path, &info) == 0 ? info.st_ino : 0;
}

RankPlace my_place() {
  RankPlace place;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> place.boot_id;
  if (place.boot_id.empty()) {
    // Without /proc the host's name is the best that tells machines apart.
    utsname system{};
    if (uname(&system) == 0) place.boot_id = std::string("host ") + system.nodename;
  }
  place.pid = getpid();
  place.uid = getuid();
  place.pid_namespace = namespace_of("/proc/self/ns/pid");
  place.net_namespace = namespace_of("/proc/self/ns/net");
  return place;
}

std::string pack(const RankPlace& place) {
  return place.boot_id + '\n' + std::to_string(place.pid) + ' ' + std::to_string(place.uid) + ' ' + std::to_string(place.pid_namespace) + ' ' +
         std::to_string(place.net_namespace);
}

RankPlace unpack(const std::string& text) {
  RankPlace place;
  std::istringstream in(text);
  std::getline(in, place.boot_id);
  in >> place.pid >> place.uid >> place.pid_namespace >> place.net_namespace;
  return place;
}

/// The name asked for if ranks at these places can use it, or the first that they can for "auto".
std::string choose(const std::string& name, const std::vector<RankPlace>& places) {
  const auto known = transport_names();
  if (name != "auto") {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      std::string all = "auto";
      for (const std::string& one : known) all += ", " + one;
      throw InvalidArgument("transport '" + name + "' is unknown; there are " + all);
    }
    const std::string reason = unavailable_reason(name, places);
    if (!reason.empty()) throw TransportError("transport " + name + " cannot be had: " + reason);
    return name;
  }
  std::string reasons;
  for (const std::string& candidate : known) {
    const std::string reason = unavailable_reason(candidate, places);
    if (reason.empty()) return candidate;
    reasons += "\n  " + reason;
  }
  throw TransportError("no transport reaches all ranks:" + reasons);
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
  for (size_t at = 1; at < places.size(); ++at) {
    const RankPlace& other = places[at];
    const std::string rank = "rank " + std::to_string(at);
    if (other.boot_id != first.boot_id) return name + " needs all ranks on one machine, but " + rank + " and rank 0 run under different kernels";
    // Two containers may both have a process 1.
    if (name == "inproc" && (other.pid != first.pid || other.pid_namespace != first.pid_namespace)) {
      return "inproc needs ranks that are threads of one process, but " + rank + " is another process than rank 0";
    }
    if (name == "shm" && other.uid != first.uid) {
      return "shm is private to a user, but " + rank + " runs as uid " + std::to_string(other.uid) + " and rank 0 as " + std::to_string(first.uid);
    }
    if (name == "shm" && other.net_namespace != first.net_namespace) {
      return "shm needs one network namespace (its descriptors travel over abstract unix sockets), but " + rank + " has another than rank 0";
    }
  }
  return "";
}

std::shared_ptr<Transport> make_transport(const TransportRequest& request) {
  const std::string asked = request.name == "auto" ? util::env().transport : request.name;
  const std::string facts = "'" + asked + "' (scheduler seed " + std::to_string(request.scheduler_seed) + ")";
  const auto said = tell_all(request.bootstrap, "transport: places", facts, [] { return pack(my_place()); });
  check_agreed(said, request.bootstrap.rank(), "transport");
  std::vector<RankPlace> places;
  for (const Said& rank : said) places.push_back(unpack(rank.made));
  const std::string name = choose(asked, places);
  if (request.scheduler_seed != 0 && name != "inproc") throw InvalidArgument("scheduler_seed needs transport inproc, not " + name);
  if (name == "inproc") return make_inproc(request.bootstrap, request.scheduler_seed);
  return make_shm(request.bootstrap);
}

}  // namespace turnout::transport
