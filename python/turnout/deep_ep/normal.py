"""dispatch and combine of many tokens: one row per token and rank (Turnout's rank_major)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .engine import Engines
from .routing import align, first_experts, ids_of_ranks, tail

__all__ = ["Handle", "combine_rows", "dispatch_rows", "ends_of_sources", "row_bytes", "side_bytes", "sms", "sources_of", "sum_wide"]


class Handle:
    """The routing of a dispatch. In place 0 it has DeepEP's rank_prefix_matrix, of which the column of this rank is filled; in place 4 is_token_in_rank."""

    def __init__(self, engine: Any, routing: Any, sources: Tensor, num_experts: int) -> None:
        self.engine, self.routing = engine, routing
        self.num_tokens: int = routing.num_tokens
        self.is_token_in_rank: Tensor | None = None
        firsts = first_experts(num_experts, engine.num_ranks)
        self.local_experts = range(firsts[engine.rank], firsts[engine.rank + 1])
        self._sources = sources

    @property
    def rank_prefix_matrix(self) -> Tensor:
        num_ranks = self.engine.num_ranks
        matrix = torch.zeros((num_ranks, num_ranks), dtype=torch.int32, device=self._sources.device)
        matrix[:, self.engine.rank] = ends_of_sources(self._sources, num_ranks)
        return matrix

    def __getitem__(self, place: int) -> Tensor | None:
        if place == 0:
            return self.rank_prefix_matrix
        if place == 4:
            return self.is_token_in_rank
        raise NotImplementedError(f"handle[{place}] of Buffer.dispatch: what DeepEP keeps there has no counterpart in Turnout")

    def again(self, rows: Tensor, scales: Tensor | None, num_sms: int) -> Any:
        """Other rows along the same routing."""
        side = () if scales is None else (scales,)
        result = self.engine.dispatch(rows, handle=self.routing, side=side, num_sms=sms(num_sms, rows))
        return result.x.contiguous() if scales is None else (result.x.contiguous(), result.side[0].contiguous())


@dataclass
class Received:
    x: Any
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    counts: list[int]
    handle: Handle


def sms(number: int, rows: Tensor) -> int:
    return number if rows.is_cuda else 0


def dispatch_rows(
    engines: Engines, rows: Tensor, scales: Tensor | None, ids: Tensor, weights: Tensor | None, *, num_experts: int, alignment: int, capacity: int,
    num_sms: int,
) -> Received:  # fmt: skip
    """ids: of experts, or bool [T, R]: of ranks alone. capacity: rows of the result, whatever comes; 0: those that came."""
    chosen = ids_of_ranks(ids, num_experts) if ids.dtype == torch.bool else ids
    side = () if scales is None else (scales,)

    def issue(engine: Any) -> Any:
        return engine.dispatch(rows, chosen, weights, side=side, capacity=capacity or None, num_sms=sms(num_sms, rows))

    # With a capacity nobody waits for counts, and ranks had better need the same: the tokens of each that the capacity is for.
    engine, result = engines.dispatch(
        issue, tokens=max(rows.shape[0], -(-capacity // engines.communicator.num_ranks)), num_experts=num_experts, row_bytes=row_bytes(rows, chosen.shape[1]), topk=chosen.shape[1],
        side_bytes=side_bytes(scales), device=rows.device,
    )  # fmt: skip
    # Copies of what is small: an array of a result keeps all of its memory, rows included.
    got, got_idx = result.x.contiguous(), result.topk_idx.to(chosen.dtype, copy=True)
    got_weights = None if weights is None else result.topk_weights.clone()
    counts: list[int] = []
    if capacity:
        nothing = tail(capacity, result.num_rows, rows.device)
        got_idx.masked_fill_(nothing, -1)
        if got_weights is not None:
            got_weights.masked_fill_(nothing, 0)
    else:
        counts = [align(count, alignment) for count in result.expert_counts.tolist()]
    handle = Handle(engine, result.handle, sources_of(result), num_experts)
    x = got if scales is None else (got, result.side[0].contiguous())
    return Received(x, got_idx, got_weights, counts, handle)


def sources_of(result: Any) -> Tensor:
    """How many rows came of each rank; of a result on a GPU, where those of each rank begin, and where the last end."""
    begins = result._recv_begin
    return result.arrived.clone() if begins is None else begins.clone()


def ends_of_sources(sources: Tensor, num_ranks: int) -> Tensor:
    """int32 [R]: how many rows came of the ranks up to each."""
    return sources.cumsum(0, dtype=torch.int32) if len(sources) == num_ranks else sources[1:]


def row_bytes(rows: Tensor, topk: int) -> int:
    """Room for rows of a dispatch, for the numbers that combine brings back, and for a row of weights in fp32."""
    return max(rows.shape[1] * max(2, rows.element_size()), 4 * topk)


def side_bytes(scales: Tensor | None) -> int:
    return 0 if scales is None else scales.shape[1] * scales.element_size()


def combine_rows(
    engine: Any, routing: Any, rows: Tensor, weights: Tensor | None, biases: tuple[Tensor, ...], num_sms: int
) -> tuple[Tensor, Tensor | None]:
    """The sums of rows, and of weights [N, K]."""
    number = sms(num_sms, rows)
    # Tensors of torch's own: DeepEP's results may be held for any time, and a lease would keep others from room.
    out = torch.empty((routing.num_tokens, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    if biases and rows.dtype in (torch.bfloat16, torch.float16):
        sum_wide(engine, routing, rows, biases, number, out)
    else:
        engine.combine(rows, routing, out=out, num_sms=number)
        for each in biases:
            out += each
    combined = None
    if weights is not None:
        # A row of weights is added like any other, so what a caller put where an expert is not local counts, as in DeepEP.
        combined = torch.empty((routing.num_tokens, weights.shape[1]), dtype=torch.float32, device=rows.device)
        engine.combine(weights, routing, out=combined, num_sms=number)
    return out, combined


def sum_wide(
    engine: Any, routing: Any, rows: Tensor, biases: tuple[Tensor, ...], num_sms: int, out: Tensor, wire: str = "payload"
) -> None:
    """Sums in fp32, with one rounding after the bias. Columns go in parts that are no wider in fp32 than the whole is."""
    hidden = rows.shape[1]
    width = max(1, hidden // 2)
    for first in range(0, hidden, width):
        part = slice(first, min(first + width, hidden))
        bias = biases[0][:, part].float()
        for each in biases[1:]:
            bias = bias + each[:, part].float()
        out[:, part] = engine.combine(rows[:, part].float(), routing, wire=wire, num_sms=num_sms).x + bias
