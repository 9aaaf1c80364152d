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

from . import _checksums, _core, tuned
from .errors import InvalidArgument, TransportError

__all__ = ["Buffer", "EventOverlap", "Overlapped"]

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i32": 4, "i64": 8}
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
        optimization_level: int = 1, tuned_file: str | None = None, **config: Any,
    ) -> None:  # fmt: skip
        """As turnout.Buffer, and:

        nvl_buffer_size: bytes of the region where results lie (receive_bytes); 0: chosen.
        rdma_buffer_size: bytes of staging for all peers together (staging_bytes is a peer's share); 0: chosen. Too little is made enough.
        use_low_latency_kernel: calls that leave mode='auto' are of mode='low_latency'.
        optimization_level, tuned_file: as set_optimization_level(); at level 2 the file's settings of a Buffer are used, too.
        """
        self._level, self._num_sms, self._tuned = 1, 0, tuned.Tuned()
        self._mode = "low_latency" if use_low_latency_kernel else "auto"
        try:
            settled = _settled(communicator, nvl_buffer_size, rdma_buffer_size, config)
            settings = _settings_of(optimization_level, tuned_file)
        except InvalidArgument as error:
            try:
                _core.Buffer.__init__(self, communicator, {}, None)  # is refused on all ranks, which would wait else
            except InvalidArgument:
                raise error from None
        # Room for what level 0 sends along, which all ranks may choose later.
        settled = {**settings.buffer, **settled, "max_side_bytes": settled.get("max_side_bytes", 0) + _checksums.NUM_BYTES}
        super().__init__(communicator, **settled)
        self._facts = self._facts_of_calls()
        self.set_optimization_level(optimization_level, tuned_file)

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

    def set_optimization_level(self, level: int, tuned_file: str | None = None) -> None:
        """Of later calls, the same on all ranks:

        0: safe. Each row travels with a checksum that is compared where it arrives (arrays of NumPy and torch, not quantized), and each call is
        finished before it returns, those of dispatch_async, too; result.side ends with the checksums. Sums that combine brings back are not compared.
        1: the default. 2: settings of a tuned file (tuned_file, else turnout.tuned.default_path()): mode and num_sms of calls that do not say
        them themselves; its settings of a Buffer count where the Buffer is made with optimization_level=2. What set_num_sms() or
        use_low_latency_kernel say goes before the file. 3: expert. Results are leases or an error, never a copy, and set_num_sms takes what
        it is given.
        """
        settings = _settings_of(level, tuned_file)
        there = _num_multiprocessors(str(self.config["device"]))
        for place, (_, use) in enumerate(settings.calls):
            if there is not None and use.get("num_sms", 0) > there:
                raise InvalidArgument(
                    f"tuned file {settings.path}: calls[{place}]: use: num_sms is {use['num_sms']}, but this GPU has {there} multiprocessors: "
                    "the file is another GPU's"
                )
        self._level, self._tuned = level, settings

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
        return self._checked(super().combine(y, handle, **self._options(options, handle=handle)), False)

    def combine_async(self, y: Any, handle: Any = None, **options: Any) -> Overlapped:
        """turnout.Buffer.combine_async with the settings of this Buffer; belongs to the event whose record() it is called in."""
        pending = super().combine_async(y, handle, **self._options(options, handle=handle))
        return self._issued(Overlapped(pending, lambda result: self._checked(result, False)))

    def _options(self, options: dict[str, Any], is_dispatch: bool = False, handle: Any = None) -> dict[str, Any]:
        defaults: dict[str, Any] = {"mode": self._mode, "num_sms": self._num_sms}
        if self._level == 2:
            found = self._tuned.for_call(self._facts | _facts_of(options, is_dispatch, handle))
            if self._mode == "auto" and options.get("mode", "auto") == "auto":
                options = {name: value for name, value in options.items() if name != "mode"}
                defaults["mode"] = found.get("mode", "auto")
            if self._num_sms == 0:
                defaults["num_sms"] = found.get("num_sms", 0)
        if is_dispatch and self._level == 3 and options.get("out") is None:
            defaults["result"] = "lease"
        return {**defaults, **options}

    def _facts_of_calls(self) -> dict[str, Any]:
        """What a tuned file may ask of every call of this Buffer."""
        config = self.config
        return {
            "device": str(config["device"]).partition(":")[0], "dtype": str(config["dtype"]), "hidden": config["hidden"],
            "max_tokens": config["max_tokens_per_rank"], "num_experts": config["num_experts"], "num_ranks": self.num_ranks,
            "bytes": config["max_tokens_per_rank"] * config["hidden"] * _ELEMENT_BYTES.get(str(config["dtype"]), 1),
        }  # fmt: skip

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


def _settled(communicator: turnout.Communicator, nvl_buffer_size: Any, rdma_buffer_size: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration that sizes by their usual names mean."""
    for name, size, ours in (("nvl_buffer_size", nvl_buffer_size, "receive_bytes"), ("rdma_buffer_size", rdma_buffer_size, "staging_bytes")):
        if not isinstance(size, int) or size < 0:
            raise InvalidArgument(f"Buffer: {name} is {size!r}, but must be a number of bytes, 0 or more")
        if size and config.get(ours):
            raise InvalidArgument(f"Buffer: {name} is {size} and {ours} is {config[ours]}, but they are one setting: give one of them")
    settled = dict(config)
    if nvl_buffer_size:
        settled["receive_bytes"] = nvl_buffer_size
    if rdma_buffer_size:
        in_flight = config.get("num_lanes", 1) * (config.get("max_outstanding", 2) + 1)
        settled["staging_bytes"] = max(1, rdma_buffer_size // (communicator.num_ranks * in_flight))
    return settled


def _settings_of(level: Any, tuned_file: str | None) -> tuned.Tuned:
    """Of level 2 what the file says; of the others nothing."""
    if level not in _LEVELS:
        known = ", ".join(f"{number} ({words})" for number, words in _LEVELS.items())
        raise InvalidArgument(f"set_optimization_level: level is {level!r}, but must be one of {known}")
    if level == 2:
        return tuned.load(tuned_file)
    if tuned_file is not None:
        raise InvalidArgument(f"set_optimization_level: tuned_file is {tuned_file!r}, but level is {level}: files are read at level 2")
    return tuned.Tuned()


def _facts_of(options: dict[str, Any], is_dispatch: bool, handle: Any) -> dict[str, Any]:
    """What a tuned file may ask of one call."""
    known = handle if handle is not None else options.get("handle")
    layout = getattr(known, "layout", None) if known is not None else options.get("layout", "rank_major")
    if is_dispatch:
        return {"op": "dispatch", "layout": layout, "quantize": options.get("quantize", "none")}
    return {"op": "combine", "layout": layout, "wire": options.get("wire", "payload")}


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
