// The public way to the log.
#include "util/log.h"

#include <utility>

namespace turnout {
inline namespace v0 {

void set_log_callback(LogCallback callback, std::optional<LogLevel> most) { util::set_log_callback(std::move(callback), most); }

}  // namespace v0
}  // namespace turnout
