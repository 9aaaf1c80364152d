"""Turnout under the names of DeepEP: frameworks that call deep_ep run on it.

    from turnout.deep_ep import Buffer, ElasticBuffer

`python -m turnout deep-ep enable` makes `import deep_ep` this package. docs/deep_ep.md says what differs.
"""

import torch as _torch

from .. import __version__ as _version
from . import hybrid_ep_buffer, utils
from .config import Config
from .elastic import ElasticBuffer, get_logical_domain_size, get_physical_domain_size
from .events import EventHandle, EventOverlap
from .handle import EPHandle
from .hybrid_ep_buffer import HybridEPBuffer
from .legacy import Buffer

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "hybrid_ep_buffer",
    "topk_idx_t",
    "utils",
]

#: What callers make ids of; int32 is taken, too.
topk_idx_t = _torch.int64
#: The interface is that of this version of DeepEP.
__version__ = f"2.1.0+turnout.{_version}"
