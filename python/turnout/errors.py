"""The four errors, by who can act: the caller, the operator, or whoever looks after a peer."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Error", "InvalidArgument", "PeerFailed", "PeerTimeout", "TransportError", "WaitRecord"]


class WaitRecord(NamedTuple):
    """What a wait was waiting for when it gave up, the same on all ranks."""

    rank: int  #: who waited, and found out
    peers: tuple[int, ...]  #: for whom
    lane: int
    call: str  #: "dispatch", "combine", "bootstrap"
    epoch: int  #: number of the call on its lane
    phase: str  #: "header", "rows", "space", "consumed", "verdict", "failed", or the step of the bootstrap
    expected: int  #: value waited for
    seen: int  #: value seen last
    peer_state: str  #: "alive", "busy", "silent", "gone", "closed" (its Buffer), "failed"


class Error(Exception):
    """Base of everything that Turnout raises."""


class InvalidArgument(Error, ValueError):
    """The caller can fix it: an argument, a configuration, or ranks that disagree about one."""


class TransportError(Error, RuntimeError):
    """The operator can fix it: no memory, no permission, no common network, a missing capability."""


class PeerTimeout(Error, TimeoutError):
    """A peer did not arrive, or did not finish, in time. `record` says who waited for whom."""

    record: WaitRecord | None = None


class PeerFailed(Error, RuntimeError):
    """A peer's process is gone or cannot be reached any more. `record` says who waited for whom."""

    record: WaitRecord | None = None


for _class in (Error, InvalidArgument, TransportError, PeerTimeout, PeerFailed, WaitRecord):
    _class.__module__ = "turnout"
del _class
