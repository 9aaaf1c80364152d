"""Turnout: dispatch and combine for Mixture-of-Experts models.

A `Communicator` says who the ranks are, a `Buffer` moves tokens between them. Arrays may be of NumPy, torch, JAX, CuPy or anything
else with DLPack; results come back as what went in. Importing this sets no environment variable, imports no framework and touches no GPU.
"""

from __future__ import annotations

import atexit as _atexit

from . import _core
from ._core import (
    Array,
    BoundCombine,
    BoundDispatch,
    CombineResult,
    Communicator,
    DispatchResult,
    Handle,
    PendingCombine,
    PendingDispatch,
    __version__,
    run_virtual_ranks,
)
from .arrays import array
from .buffer import Buffer, required_bytes
from .errors import Error, InvalidArgument, PeerFailed, PeerTimeout, TransportError, WaitRecord

__all__ = [
    "Array",
    "BoundCombine",
    "BoundDispatch",
    "Buffer",
    "CombineResult",
    "Communicator",
    "DispatchResult",
    "Error",
    "Handle",
    "InvalidArgument",
    "PeerFailed",
    "PeerTimeout",
    "PendingCombine",
    "PendingDispatch",
    "TransportError",
    "WaitRecord",
    "__version__",
    "array",
    "required_bytes",
    "run_virtual_ranks",
]

_atexit.register(_core._stop_log)  # after what is registered later
# While the interpreter still works: threads of ours end, and peers that wait for this process learn that it goes.
_atexit.register(_core._close_all)
