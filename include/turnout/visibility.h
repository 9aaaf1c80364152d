// The one visibility macro: everything else in the library is hidden.
#pragma once
#if defined(_WIN32)
#define TURNOUT_API
#else
#define TURNOUT_API __attribute__((visibility("default")))
#endif
