/* Everything, for C (C11): the calls of turnout.hpp.
 *
 * Each function returns a turnout_status; turnout_last_error() has the words. Objects are made by functions with an output
 * pointer as last argument, which is set to null when they fail, and belong to the caller, who destroys each once;
 * destroying null does nothing. Structs that start with `struct_size` are set to zero, then struct_size = sizeof the struct,
 * then the fields that matter: zero always means the default. (`turnout_buffer_config c = {.struct_size = sizeof c, ...};`) */
#pragma once
#include "turnout/c/buffer.h"
#include "turnout/c/communicator.h"
#include "turnout/c/types.h"
