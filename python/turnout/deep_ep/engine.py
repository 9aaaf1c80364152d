"""The Buffers of Turnout behind an object of deep_ep.

DeepEP's constructors do not know the experts, the width of rows or the tokens of a call, and Turnout's Buffer is made for all three. So one is
made by the first call that needs it, and made anew by a call that needs more. What a call needs is the same on all ranks, and so they come to
that together, but for the number of tokens: a rank with more than there is room for refuses the call, by which all ranks hear of it, and
agree on a size before they call again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import turnout
import turnout.torch

from ..errors import InvalidArgument

__all__ = ["Engines", "communicator_of", "size_of"]

T = TypeVar("T")


def communicator_of(group: Any, comm: Any = None) -> turnout.Communicator:
    """Of a ProcessGroup, of a turnout.Communicator, or of a communicator of mpi4py. Collective."""
    if (group is None) == (comm is None):
        raise InvalidArgument("exactly one of group and comm must be given: a ProcessGroup, or a communicator of mpi4py")
    if isinstance(group, turnout.Communicator):
        return group
    if comm is None:
        return turnout.torch.communicator(group)
    return turnout.Communicator.from_store(_store_over(comm), comm.Get_rank(), comm.Get_size(), "turnout.deep_ep")


def size_of(group: Any) -> int:
    return group.num_ranks if isinstance(group, turnout.Communicator) else group.size()


def _store_over(comm: Any) -> torch.distributed.TCPStore:
    """A store that rank 0 serves, at an address that all learn by a broadcast."""
    import socket

    address: Any = None
    if comm.Get_rank() == 0:
        store = torch.distributed.TCPStore(socket.gethostname(), 0, None, True, wait_for_workers=False)
        comm.bcast((store.host, store.port), root=0)
        return store
    address = comm.bcast(address, root=0)
    return torch.distributed.TCPStore(*address, None, False, wait_for_workers=False)


class Engines:
    """Buffers by what they are for. A handle keeps the Buffer that made it, so one that was replaced lives until its handles are gone."""

    def __init__(self, communicator: turnout.Communicator, **options: Any) -> None:
        self.communicator = communicator
        self._options = options
        self._engines: dict[Any, turnout.torch.Buffer] = {}
        self._last: dict[str, turnout.torch.Buffer] = {}  # by kind, the one of the latest call
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank in all of them."""
        return sum(engine.num_bytes for engine in self._engines.values())

    def get(self, num_tokens: int, *, num_experts: int, row_bytes: int, topk: int, side_bytes: int = 0, device: torch.device, kind: str = "") -> Any:
        """The Buffer for a call. All ranks with the same arguments, but for num_tokens where kind is ''."""
        self._check_open()
        key = (kind, num_experts, device.type)
        engine = self._engines.get(key)
        needs = {"hidden": max(1, -(-row_bytes // 2)), "max_topk": max(1, topk), "max_side_bytes": side_bytes}
        if kind:
            needs["max_tokens_per_rank"] = num_tokens
        if engine is None or any(engine.config[name] < value for name, value in needs.items()):
            engine = self._make(key, needs, engine, num_tokens, device)
        self._last[kind] = engine
        return engine

    def dispatch(self, issue: Callable[[Any], T], num_tokens: int, **needs: Any) -> tuple[Any, T]:
        """The Buffer and issue(Buffer), with room for the tokens of every rank."""
        engine = self.get(num_tokens, **needs)
        try:
            return engine, issue(engine)
        except InvalidArgument:
            # Raised on all ranks, so all of them come here.
            limit = engine.config["max_tokens_per_rank"]
            if self._agree(num_tokens) <= limit:
                raise
        kind = needs.get("kind", "")
        key = (kind, needs["num_experts"], needs["device"].type)
        config = {name: engine.config[name] for name in ("hidden", "max_topk", "max_side_bytes")}
        self._last[kind] = engine = self._make(key, config, engine, num_tokens, needs["device"])
        return engine, issue(engine)

    def refuse(self, call: str, error: Exception, kind: str = "", engine: Any = None) -> None:
        """Before this rank raises what it found wrong by itself: the others hear that it does not make the call, and raise, too.

        call: 'dispatch', 'cached' (a dispatch with a handle) or 'combine'. engine: that of the handle, if there is one."""
        if self._closed:
            return
        engine = engine or self._last.get(kind)
        if engine is not None:
            engine._refuse("combine" if call == "combine" else "dispatch", 0)
        if call == "dispatch" and (engine is None or kind == ""):
            try:
                self._agree(0, error)  # as the others do: to make their first Buffer, or because they were refused
            except InvalidArgument:
                pass

    def close(self) -> None:
        """Local: never waits for a peer."""
        self._closed = True
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("this buffer was destroyed: make a new one")

    def _make(self, key: Any, needs: dict[str, int], old: Any, num_tokens: int, device: torch.device) -> Any:
        _, num_experts, _ = key
        tokens = max(1, self._agree(num_tokens), old.config["max_tokens_per_rank"] if old is not None else 0)
        if old is not None:
            needs = {name: max(value, old.config[name]) for name, value in needs.items()}
        # Twice the size each time, so that growing is rare.
        needs["max_tokens_per_rank"] = 1 << (tokens - 1).bit_length()
        engine = turnout.torch.Buffer(self.communicator, num_experts=num_experts, dtype="bf16", device=device, **needs, **self._options)
        self._engines[key] = engine
        return engine

    def _agree(self, num_tokens: int, error: Exception | None = None) -> int:
        """The most tokens of any rank. Collective; raises if a rank found something wrong."""
        mine = {"tokens": num_tokens, "error": None if error is None else str(error)}
        answers = [json.loads(answer) for answer in self.communicator.all_gather(json.dumps(mine).encode())]
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise InvalidArgument(f"refused by rank {rank}: {answer['error']}")
        return max(answer["tokens"] for answer in answers)
