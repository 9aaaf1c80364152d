"""Events of deep_ep. Calls are in order of the caller's current stream, so what an event adds is order towards other streams of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["EventHandle", "EventOverlap"]


class EventHandle:
    """A point in the current stream. On a CPU, where calls are in order of the program, nothing."""

    def __init__(self) -> None:
        self.event: Any = None
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream())

    def current_stream_wait(self) -> None:
        """The current stream goes on when the point has been reached; the host does not wait."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """An EventHandle or none, with what must live until somebody has waited for it. `with` waits at its end."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None

    def register_hook_after_wait(self, fn: Callable[[], None]) -> None:
        """`fn` runs once, after the next wait. There may be one."""
        if self.hook_after_wait is not None:
            raise ValueError("register_hook_after_wait: this event has a hook already, which has not run yet: wait first")
        self.hook_after_wait = fn

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream goes on when the call is done; the host does not wait. Raises ValueError if the call was not asynchronous."""
        if self.event is None:
            raise ValueError("current_stream_wait: this EventOverlap has no event, as of a call that was not asynchronous: ask `.event is not None`")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event, self.extra_tensors = None, None

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release_handle = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *args: object) -> None:
        if self.event is not None:
            self.current_stream_wait(getattr(self, "_release_handle", False))


def wait_for(previous: EventOverlap | EventHandle | None) -> None:
    """The current stream waits for an event of either kind; None, and one without an event, is nothing to wait for."""
    handle = previous.event if isinstance(previous, EventOverlap) else previous
    if isinstance(handle, EventHandle):
        handle.current_stream_wait()


def finished(asynchronous: bool, tensors: tuple[Any, ...] = ()) -> EventOverlap:
    """What a call returns: an event after it if it was asynchronous, else one without."""
    if not asynchronous:
        return EventOverlap()
    return EventOverlap(EventHandle(), tuple(each for each in tensors if isinstance(each, torch.Tensor)))
