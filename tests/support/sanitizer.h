// What a test needs to know of the sanitizer that it was built with.
#pragma once

namespace turnout::testing {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitizer = true;  ///< it does not follow forked ranks
#else
constexpr bool kThreadSanitizer = false;
#endif

}  // namespace turnout::testing
