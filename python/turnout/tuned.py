"""Tuned files: settings that were found best on a machine, for level 2 of turnout.compat.Buffer.set_optimization_level (docs/tuned.md).

    {"schema": 1,
     "made": {"by": "hand", "device": "NVIDIA H200"},
     "buffer": {"staging_bytes": 8388608},
     "low_latency_up_to_bytes": 1048576,
     "calls": [{"when": {"op": "combine", "max_tokens": [1, 512]}, "use": {"num_sms": 24}},
               {"when": {"layout": "expert_slab"}, "use": {"mode": "low_latency"}}]}

All ranks of a Buffer read the same settings: `when` can only ask what is the same on all of them.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import InvalidArgument

__all__ = ["Tuned", "default_path", "load", "save"]

SCHEMA = 1
_OPS = ("dispatch", "combine")
_MODES = ("auto", "throughput", "low_latency")
#: What `when` may ask: the words there are, or None for a pair [least, most] of whole numbers.
_WHEN: dict[str, tuple[str, ...] | None] = {
    "op": _OPS, "layout": ("rank_major", "expert_major", "expert_slab"), "quantize": ("none", "fp8_e4m3", "fp8_e4m3_ue8m0"),
    "wire": ("payload", "fp32", "fp8", "rows"), "dtype": ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2", "u8", "i8", "i32", "i64", "ue8m0"),
    "device": ("cpu", "cuda"), "max_tokens": None, "hidden": None, "num_ranks": None, "num_experts": None,
}  # fmt: skip
_BUFFER = {"staging_bytes": (1, 1 << 46), "receive_bytes": (1, 1 << 46), "num_threads": (1, 256), "max_outstanding": (1, 64)}


@dataclass(frozen=True)
class Tuned:
    """The settings of a file."""

    path: str = ""
    buffer: Mapping[str, int] = field(default_factory=dict)  #: of Buffers that are made with them and do not say otherwise
    low_latency_up_to_bytes: int | None = None  #: of max_tokens_per_rank rows: mode='auto' is low_latency up to here, throughput beyond
    calls: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = ()  #: (when, use), in order

    def for_call(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """`mode` and `num_sms` of a call, where the file says something: of each the first that fits. facts: what `when` may ask, and
        `bytes` of the largest call. A fact that is missing fits nothing."""
        found: dict[str, Any] = {}
        for when, use in self.calls:
            if all(_fits(facts.get(key), wanted) for key, wanted in when.items()):
                for name, value in use.items():
                    found.setdefault(name, value)
        if self.low_latency_up_to_bytes is not None:
            found.setdefault("mode", "low_latency" if facts["bytes"] <= self.low_latency_up_to_bytes else "throughput")
        return found


def default_path() -> str:
    """TURNOUT_TUNED_FILE, else turnout/tuned.json where a user's settings are: $XDG_CONFIG_HOME, else ~/.config."""
    named = os.environ.get("TURNOUT_TUNED_FILE")
    if named:
        return named
    return os.path.join(os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config"), "turnout", "tuned.json")


def load(path: str | os.PathLike[str] | None = None) -> Tuned:
    """The settings of a file (None: default_path()). Raises InvalidArgument naming the file, the place in it and what would do."""
    name = os.fspath(path) if path is not None else default_path()
    try:
        text = pathlib.Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(
            f"tuned file {name}: it cannot be read: {why}. TURNOUT_TUNED_FILE names another; docs/tuned.md says how one is written"
        ) from None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"tuned file {name}: it is not JSON: {error}") from None
    return _parse(name, content)


def save(
    path: str | os.PathLike[str],
    *,
    calls: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]] = (),
    buffer: Mapping[str, int] | None = None,
    low_latency_up_to_bytes: int | None = None,
    made: Mapping[str, Any] | None = None,
) -> Tuned:
    """Writes a file, in one step, after the checks of load(). calls: (when, use), in order. made: notes for people, which nothing reads."""
    content: dict[str, Any] = {"schema": SCHEMA}
    if made is not None:
        content["made"] = dict(made)
    if buffer:
        content["buffer"] = dict(buffer)
    if low_latency_up_to_bytes is not None:
        content["low_latency_up_to_bytes"] = low_latency_up_to_bytes
    content["calls"] = [{"when": dict(when), "use": dict(use)} for when, use in calls]
    name = os.fspath(path)
    tuned = _parse(name, content)
    target = pathlib.Path(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, target)
    return tuned


def _fits(fact: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return fact is not None and wanted[0] <= fact <= wanted[1]
    return fact == wanted


def _parse(name: str, content: Any) -> Tuned:
    at = f"tuned file {name}"
    fields = _object(at, content, ("schema", "made", "buffer", "low_latency_up_to_bytes", "calls"))
    if fields.get("schema") != SCHEMA:
        raise InvalidArgument(f"{at}: schema is {fields.get('schema')!r}, but this version reads {SCHEMA}: make the file anew")
    buffer = _object(f"{at}: buffer", fields.get("buffer", {}), tuple(_BUFFER))
    for key, value in buffer.items():
        _whole(f"{at}: buffer: {key}", value, *_BUFFER[key])
    threshold = fields.get("low_latency_up_to_bytes")
    if threshold is not None:
        _whole(f"{at}: low_latency_up_to_bytes", threshold, 0, 1 << 60)
    calls = fields.get("calls", [])
    if not isinstance(calls, list):
        raise InvalidArgument(f"{at}: calls is {calls!r}, but must be a list of {{'when': ..., 'use': ...}}")
    return Tuned(name, buffer, threshold, tuple(_entry(f"{at}: calls[{place}]", entry) for place, entry in enumerate(calls)))


def _entry(at: str, entry: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    fields = _object(at, entry, ("when", "use"))
    when, use = _object(f"{at}: when", fields.get("when", {}), tuple(_WHEN)), _object(f"{at}: use", fields.get("use", {}), ("mode", "num_sms"))
    for key, wanted in when.items():
        words = _WHEN[key]
        if words is not None:
            _word(f"{at}: when: {key}", wanted, words)
        elif not (isinstance(wanted, list) and len(wanted) == 2 and all(type(number) is int for number in wanted) and 0 <= wanted[0] <= wanted[1]):
            raise InvalidArgument(f"{at}: when: {key} is {wanted!r}, but must be [least, most], whole numbers")
    if not use:
        raise InvalidArgument(f"{at}: use is empty, but must say mode, num_sms or both")
    if "mode" in use:
        _word(f"{at}: use: mode", use["mode"], _MODES)
    if "num_sms" in use:
        _whole(f"{at}: use: num_sms", use["num_sms"], 0, 1024)
    return when, use


def _object(at: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument(f"{at}: it is {value!r}, but must be an object with {', '.join(known)}")
    for key in value:
        if key not in known:
            raise InvalidArgument(f"{at}: there is no {key!r}: use {', '.join(known)}")
    return value


def _word(at: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        raise InvalidArgument(f"{at} is {value!r}, but must be one of {', '.join(words)}")


def _whole(at: str, value: Any, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgument(f"{at} is {value!r}, but must be a whole number from {least} to {most}")
