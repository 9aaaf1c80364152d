// What a selftest tries: one call or a few, on all ranks, each compared with the reference bit for bit.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "tools/flip.h"
#include "turnout/buffer.h"
#include "turnout/communicator.h"

namespace turnout::tools {

enum class Size { exact, fits, full };

/// How the calls are made.
enum class Way {
  plain,     ///< dispatch, combine; results where the library wants them
  fresh,     ///< results in memory of their own
  cached,    ///< other rows along the routing of a dispatch before
  deferred,  ///< issued, and received when waited for
  resident,  ///< issued, and received meanwhile
  graph,     ///< captured on a GPU, replayed twice with other rows
};

struct TestCase {
  Mode mode;
  Layout layout;
  Size size;
  DType dtype = DType::bf16;
  Quantize quantize = Quantize::none;
  Wire wire = Wire::payload;
  Way way = Way::plain;

  /// "throughput, rank_major, capacity, bf16, wire fp32"
  std::string to_string() const;
};

/// In groups of the same mode and layout. Graphs: on a GPU only.
std::vector<TestCase> all_test_cases(bool on_gpu);

/// What differs on this rank, in words, or empty. Collective. Throws: InvalidArgument (on all ranks), TransportError, ...
/// `flip`: on a CPU, what changes a bit on its way; armed here. `corrupt_arrived`: a bit is changed where it arrived.
std::string run_test_case(Communicator& communicator, const TestCase& c, Device device, Flip* flip, bool corrupt_arrived);

}  // namespace turnout::tools
