// inproc keeps the contract, with and without the scheduler.
#include "transport/inproc/inproc.h"

#include "contract.h"

namespace turnout::transport::testing {

INSTANTIATE_TEST_SUITE_P(Inproc, TransportContract,
                         subjects({{"inproc", [](Bootstrap& b) { return make_inproc(b, 0); }},
                                   {"scheduled", [](Bootstrap& b) { return make_inproc(b, 7); }},
                                   {"scheduled_otherwise", [](Bootstrap& b) { return make_inproc(b, 0x123456789abcdef0); }}}),
                         subject_name);

}  // namespace turnout::transport::testing
