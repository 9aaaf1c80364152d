// Lines of the library as records of Python's `logging`.
#pragma once

namespace turnout::python {

/// From here on lines go to the logger "turnout" where the program has set up logging, else to stderr as they would without Python.
void start_log();
/// Lines down to the level that the logger has now, or that TURNOUT_LOG admits, are made from here on. With the interpreter's lock; cheap.
void follow_log_level();
/// What was logged is handed on, and later lines go to stderr: at the exit of the interpreter. With the interpreter's lock. Idempotent.
void stop_log();

}  // namespace turnout::python
