// A program that was started with its standard streams closed must not find its output in one of our sockets or memory files.
#pragma once

namespace turnout::util {

/// The same file under a number above those of the standard streams; closes `fd` where it was one of them. -1, with errno, stays -1.
int above_standard_streams(int fd);

}  // namespace turnout::util
