"""Overlap and settings by the names that guides of this field use, one to one onto turnout.Buffer.

    buffer = turnout.compat.Buffer(communicator, num_experts=64, hidden=7168, max_tokens_per_rank=4096, nvl_buffer_size=1 << 28)
    event = turnout.compat.EventOverlap()
    with event.record():
        h = buffer.dispatch_async(x, topk_idx, topk_weights)
    y = something_else()
    event.synchronize()
    experts(h.x)

Of the environment DEEP_EP_RDMA_CHUNK_SIZE is read as TURNOUT_STAGING_BYTES and NVSHMEM_IB_SL as TURNOUT_IB_SL, by every program (docs/env.md).
For programs that are written for deep_ep itself there is turnout.deep_ep.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import turnout

from . import _checksums
from .errors import InvalidArgument, TransportError

__all__ = ["Buffer", "EventOverlap", "Overlapped"]

_LEVELS = {0: "safe, verified", 1: "default", 2: "a tuned file", 3: "expert"}


class Overlapped:
    """A call that was issued. What its result has (x, handle, ...) is had from here, too, waiting for it if need be."""

    def __init__(self, pending: Any, finish: Any) -> None:
        self._pending, self._finish = pending, finish
        self._result: Any = None

    def wait(self) -> Any:
        """Receives what the call brought, once; later calls give the same result. Raises as the call itself."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._result = self._finish(pending.wait())
        if self._result is None:
            raise InvalidArgument("Overlapped: the call failed when it was waited for")
        return self._result

    @property
    def is_done(self) -> bool:
        """Whether it has been waited for."""
        return self._pending is None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.wait(), name)


class _Recording(threading.local):
    """Events whose record() this thread is in."""

    def __init__(self) -> None:
        self.events: list[EventOverlap] = []


_recording = _Recording()


class EventOverlap:
    """What was issued in record(): synchronize() receives it."""

    def __init__(self) -> None:
        self._calls: list[Overlapped] = []
        self._buffers: list[Buffer] = []

    @contextlib.contextmanager
    def record(self) -> Iterator[EventOverlap]:
        """Calls that this thread issues inside belong to the event: dispatch_async and combine_async of a turnout.compat.Buffer."""
        _recording.events.append(self)
        try:
            yield self
        finally:
            _recording.events.remove(self)

    def current_stream_wait(self) -> None:
        """Receives what was recorded, in the order in which it was issued: on a GPU in order of the streams of the calls."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.wait()

    def synchronize(self) -> None:
        """The same, and on a GPU the host waits until it is there. Nothing was recorded: returns at once. Raises as the calls."""
        buffers, self._buffers = self._buffers, []
        self.current_stream_wait()
        for buffer in buffers:
            buffer.synchronize()

    def _add(self, call: Overlapped, buffer: Buffer) -> None:
        self._calls.append(call)
        if buffer not in self._buffers:
            self._buffers.append(buffer)


class Buffer(turnout.Buffer):
    """turnout.Buffer with constructor arguments and settings by their usual names. Errors: as those of turnout.Buffer."""

    def __init__(
        self, communicator: turnout.Communicator, *, nvl_buffer_size: int = 0, rdma_buffer_size: int = 0, use_low_latency_kernel: bool = False,
        **config: Any,
    ) -> None:  # fmt: skip
        """As turnout.Buffer, and:

        nvl_buffer_size: bytes of the region where results lie (receive_bytes); 0: chosen.
        rdma_buffer_size: bytes of staging for all peers together (staging_bytes is a peer's share); 0: chosen. Too little is made enough.
        use_low_latency_kernel: calls that leave mode='auto' are of mode='low_latency'.
        """
        for name, size, ours in (("nvl_buffer_size", nvl_buffer_size, "receive_bytes"), ("rdma_buffer_size", rdma_buffer_size, "staging_bytes")):
            if not isinstance(size, int) or size < 0:
                raise InvalidArgument(f"Buffer: {name} is {size!r}, but must be a number of bytes, 0 or more")
            if size and config.get(ours):
                raise InvalidArgument(f"Buffer: {name} is {size} and {ours} is {config[ours]}, but they are one setting: give one of them")
        if nvl_buffer_size:
            config["receive_bytes"] = nvl_buffer_size
        if rdma_buffer_size:
            in_flight = config.get("num_lanes", 1) * (config.get("max_outstanding", 2) + 1)
            config["staging_bytes"] = max(1, rdma_buffer_size // (communicator.num_ranks * in_flight))
        self._level, self._num_sms = 1, 0
        self._mode = "low_latency" if use_low_latency_kernel else "auto"
        # Room for what level 0 sends along, which all ranks may choose later.
        super().__init__(communicator, **{**config, "max_side_bytes": config.get("max_side_bytes", 0) + _checksums.NUM_BYTES})

    def set_num_sms(self, num_sms: int) -> None:
        """Most multiprocessors for each later call that does not say num_sms itself; 0: as many as it gains from. On a CPU nothing comes of it.

        Raises InvalidArgument if the GPU has fewer (but for level 3, where the call itself says so).
        """
        if not isinstance(num_sms, int) or num_sms < 0:
            raise InvalidArgument(f"set_num_sms: num_sms is {num_sms!r}, but must be a whole number, 0 or more")
        there = _num_multiprocessors(str(self.config["device"])) if self._level < 3 else None
        if there is not None and num_sms > there:
            raise InvalidArgument(f"set_num_sms: num_sms is {num_sms}, but this GPU has {there} multiprocessors: give 1 to {there}, for instance 16")
        self._num_sms = num_sms

    def set_optimization_level(self, level: int) -> None:
        """Of later calls, the same on all ranks:

        0: safe. Each row travels with a checksum that is compared where it arrives (arrays of NumPy and torch, not quantized), and each call is
        finished before it returns, those of dispatch_async, too; result.side ends with the checksums. 1: the default. 2: settings of a tuned file, which this version cannot read yet:
        refused. 3: expert. Results are leases or an error, never a copy, and set_num_sms takes what it is given.
        """
        if level not in _LEVELS:
            known = ", ".join(f"{number} ({words})" for number, words in _LEVELS.items())
            raise InvalidArgument(f"set_optimization_level: level is {level!r}, but must be one of {known}")
        if level == 2:
            raise InvalidArgument("set_optimization_level: level is 2, but this version has no tuned files: use 1, and set_num_sms() to choose by hand")
        self._level = level

    def dispatch(self, x: Any, topk_idx: Any = None, topk_weights: Any = None, *, wait: bool = True, **options: Any) -> Any:
        """turnout.Buffer.dispatch with the settings of this Buffer. wait=False: dispatch_async."""
        if not wait:
            return self.dispatch_async(x, topk_idx, topk_weights, **options)
        sums = self._with_checksums(x, options)
        return self._checked(super().dispatch(x, topk_idx, topk_weights, **self._options(options, is_dispatch=True)), sums)

    def dispatch_async(self, x: Any, topk_idx: Any = None, topk_weights: Any = None, **options: Any) -> Overlapped:
        """turnout.Buffer.dispatch_async with the settings of this Buffer; belongs to the event whose record() it is called in."""
        sums = self._with_checksums(x, options)
        pending = super().dispatch_async(x, topk_idx, topk_weights, **self._options(options, is_dispatch=True))
        return self._issued(Overlapped(pending, lambda result: self._checked(result, sums)))

    def combine(self, y: Any, handle: Any = None, *, wait: bool = True, **options: Any) -> Any:
        """turnout.Buffer.combine with the settings of this Buffer. wait=False: combine_async."""
        if not wait:
            return self.combine_async(y, handle, **options)
        return self._checked(super().combine(y, handle, **self._options(options)), False)

    def combine_async(self, y: Any, handle: Any = None, **options: Any) -> Overlapped:
        """turnout.Buffer.combine_async with the settings of this Buffer; belongs to the event whose record() it is called in."""
        pending = super().combine_async(y, handle, **self._options(options))
        return self._issued(Overlapped(pending, lambda result: self._checked(result, False)))

    def _options(self, options: dict[str, Any], is_dispatch: bool = False) -> dict[str, Any]:
        defaults: dict[str, Any] = {"mode": self._mode, "num_sms": self._num_sms}
        if is_dispatch and self._level == 3 and options.get("out") is None:
            defaults["result"] = "lease"
        return {**defaults, **options}

    def _with_checksums(self, x: Any, options: dict[str, Any]) -> bool:
        """Level 0: adds a checksum of each row to what travels with it."""
        if self._level != 0 or options.get("quantize", "none") != "none" or not _checksums.can_check(x):
            return False
        options["side"] = (*options.get("side", ()), _checksums.of(x))
        return True

    def _issued(self, call: Overlapped) -> Overlapped:
        if self._level == 0:
            call.wait()
        elif _recording.events:
            _recording.events[-1]._add(call, self)
        return call

    def _checked(self, result: Any, has_checksums: bool) -> Any:
        if self._level != 0 and not has_checksums:
            return result
        self.synchronize()
        if has_checksums and (wrong := _checksums.first_wrong(result)) is not None:
            raise TransportError(
                f"dispatch: row {wrong} of the result on rank {self.rank} is not what was sent: its checksum differs. Memory or a link of this machine "
                "is not to be trusted"
            )
        return result


def _num_multiprocessors(device: str) -> int | None:
    """Of a GPU, asked of its driver; None for a CPU, or where there is no driver to ask."""
    if not device.startswith("cuda"):
        return None
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle, count = ctypes.c_int(), ctypes.c_int()
    number = int(device.partition(":")[2] or 0)
    of_multiprocessors = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), number)
    if failed or driver.cuDeviceGetAttribute(ctypes.byref(count), of_multiprocessors, handle):
        return None
    return count.value
