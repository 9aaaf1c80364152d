// Where the memory of a test's tensors is: on the host as it stands, or on a device that a test brings along.
#pragma once
#include "tools/place.h"

namespace turnout::testing {

using tools::Place;
using tools::span_bytes;

}  // namespace turnout::testing
