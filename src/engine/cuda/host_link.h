// What differs where ranks reach each other through memory of the host (cuda_host): a row is written across PCIe by its sender and read
// across PCIe by its receiver, about 40 GB/s each way at once. So few SMs do: more of them only queue up in front of the link, where they
// delay the signals, and whoever waits for a signal takes of the link what rows need.
#pragma once

namespace turnout::engine::cuda {

inline constexpr int kHostMoveSms = 32, kHostSenders = 4, kHostReceivers = 8;
inline constexpr int kHostTakeRing = 6;  ///< rows that a warp of a receiver has under way, or waits for
inline constexpr int kHostPushRing = 4;  ///< rows that a warp has under way: the link takes one in 0.4 us
inline constexpr int kHostCombineSms = 16, kHostBatch = 2;
/// Tokens by which partial sums for other ranks are ahead of own tokens: what the blocks have taken and not yet written, and some.
inline constexpr int kHostLead = 300;
inline constexpr unsigned kHostPollNs = 500;  ///< between two looks at a signal: an answer takes 1 to 2 us

}  // namespace turnout::engine::cuda
