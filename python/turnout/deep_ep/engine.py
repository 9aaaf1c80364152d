"""The Buffers of Turnout behind an object of deep_ep.

DeepEP's constructors do not know the experts, the width of rows or the tokens of a call, and Turnout's Buffer is made for all of them. So one
is made by the first call that needs it, and made anew for a call that needs more. A rank whose call needs more refuses it first, by which all
ranks hear of it; then they tell each other what they need, and make the call again on a Buffer with room for all. This is also the way in which
a rank that finds its arguments wrong tells the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import turnout
import turnout.torch

from ..errors import Error, InvalidArgument
from .routing import align

__all__ = ["Engines", "communicator_of", "size_of"]

T = TypeVar("T")
_GONE = "this buffer was destroyed: make a new one"


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
        self._limits: dict[Any, dict[str, int]] = {}  # of each, and the same
        self._last: dict[str, turnout.torch.Buffer] = {}  # by kind, the one of the latest call
        self._closed = False

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank in all of them."""
        return sum(engine.num_bytes for engine in self._engines.values())

    def dispatch(
        self, issue: Callable[[Any], T], *, num_experts: int, tokens: int, row_bytes: int, topk: int, side_bytes: int, device: torch.device, kind: str = "",
        rows_come_back: int = 0,
    ) -> tuple[Any, T]:
        """A Buffer with room for what this call is on any rank, and issue(Buffer). Collective: issue makes one dispatch.

        kind: calls of one kind share a Buffer if their num_experts are the same. rows_come_back: combines for which there is room where every
        expert's row comes back (wire="rows"): memory that only a GPU needs."""
        if self._closed:
            raise InvalidArgument(_GONE)
        needs = {"max_tokens_per_rank": max(1, tokens), "hidden": max(1, -(-row_bytes // 2)), "max_topk": max(1, topk), "max_side_bytes": side_bytes}
        key = (kind, num_experts, device.type)
        engine = self._engines.get(key)
        if engine is not None:
            self._last[kind] = engine
            limits = self._limits[key]
            if _fits(limits, needs):
                try:
                    return engine, issue(engine)
                except InvalidArgument:
                    # Raised on all ranks, so all of them come here.
                    wanted = self._agree(needs)
                    if _fits(limits, wanted):
                        raise
                    needs = wanted
            else:
                engine._refuse("dispatch", 0)
                needs = self._agree(needs)
            needs = {name: max(value, limits[name]) for name, value in needs.items()}
        else:
            needs = self._agree(needs)
        # Twice the tokens each time, so that growing is rare.
        needs["max_tokens_per_rank"] = 1 << (needs["max_tokens_per_rank"] - 1).bit_length()
        room = {}
        if rows_come_back and device.type == "cuda":
            room["receive_bytes"] = _receive_bytes(needs, self.communicator.num_ranks, rows_come_back)
        engine = turnout.torch.Buffer(self.communicator, num_experts=num_experts, dtype="bf16", device=device, **needs, **room, **self._options)
        self._engines[key] = self._last[kind] = engine
        self._limits[key] = needs
        return engine, issue(engine)

    def again(self, issue: Callable[[], T]) -> T:
        """issue(), a dispatch with a handle: it needs no more room than the handle's own, but is refused like any."""
        if self._closed:
            raise InvalidArgument(_GONE)
        try:
            return issue()
        except InvalidArgument:
            self._agree({})
            raise

    def refuse(self, call: str, error: Exception, kind: str = "", engine: Any = None) -> None:
        """Before this rank raises what it found wrong by itself: the others hear that it does not make the call, and raise, too.

        call: 'dispatch' or 'combine'. engine: that of the handle, if there is one."""
        if self._closed:
            return
        engine = engine or self._last.get(kind)
        if engine is not None:
            engine._refuse("combine" if call == "combine" else "dispatch", 0)
        if call == "dispatch":
            try:
                self._agree({}, error)
            except Error:
                pass  # what it says is this error, or that the others did not come: `error` says more

    def close(self) -> None:
        """Local: never waits for a peer."""
        self._closed = True
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    def _agree(self, needs: dict[str, int], error: Exception | None = None) -> dict[str, int]:
        """The most that any rank needs. Collective; raises if a rank found something wrong."""
        mine = {"needs": needs, "error": None if error is None else str(error)}
        answers = [json.loads(answer) for answer in self.communicator.all_gather(json.dumps(mine).encode())]
        for rank, answer in enumerate(answers):
            if answer["error"] is not None:
                raise InvalidArgument(f"refused by rank {rank}: {answer['error']}")
        return {name: max(answer["needs"].get(name, 0) for answer in answers) for name in needs}


def _receive_bytes(needs: dict[str, int], num_ranks: int, combines: int) -> int:
    """What results take, and the rows of so many combines on their way back."""
    tokens, row, topk = needs["max_tokens_per_rank"], align(2 * needs["hidden"], 128), needs["max_topk"]
    copies = tokens * min(num_ranks, topk)
    results = 3 * (copies * (row + row // 16 + needs["max_side_bytes"] + 12 * topk + 1024) + (1 << 20))
    return results + combines * copies * (topk * (row + 8) + 256)


def _fits(limits: dict[str, int], needs: dict[str, int]) -> bool:
    return all(limits[name] >= value for name, value in needs.items())
