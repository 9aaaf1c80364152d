// Everything, for C++.
#pragma once
#include "turnout/bootstrap.h"
#include "turnout/buffer.h"
#include "turnout/communicator.h"
#include "turnout/config.h"
#include "turnout/error.h"
#include "turnout/handle.h"
#include "turnout/log.h"
#include "turnout/tensor.h"
#include "turnout/types.h"
