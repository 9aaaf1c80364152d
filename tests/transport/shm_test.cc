// shm keeps the contract between threads, each with its own mapping.
#include "transport/shm/shm.h"

#include "contract.h"

namespace turnout::transport::testing {

INSTANTIATE_TEST_SUITE_P(Shm, TransportContract, subjects({{"shm", make_shm}}), subject_name);

}  // namespace turnout::transport::testing
