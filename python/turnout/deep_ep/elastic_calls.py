"""dispatch and combine of the second interface, as calls of Turnout: rank_major, or expert_major where rows are expanded.

The origin of a row travels with it, and so do the weights of its token where all of them are wanted on the other side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .engine import Engines
from .handle import EPHandle, Expanded, expanded_rows, source_metadata
from .normal import ends_of_sources, row_bytes, side_bytes, sms, sources_of, sum_wide
from .routing import align, first_experts, numbers, slots, tail

__all__ = ["Received", "combine_call", "dispatch_again", "dispatch_call"]


_WORDS = 4  # of four bytes in one of 16


@dataclass
class Received:
    x: Tensor
    sf: Tensor | None
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle


def dispatch_call(
    engines: Engines, rows: Tensor, sf: Tensor | None, ids: Tensor, weights: Tensor | None, *, num_experts: int, max_tokens: int, alignment: int,
    num_sms: int, expand: bool, multiple: bool, exact: bool, zero_padding: bool, column_major: bool,
) -> Received:  # fmt: skip
    topk, device = ids.shape[1], rows.device
    rank, num_ranks = engines.communicator.rank, engines.communicator.num_ranks
    num_local = -(-num_experts // num_ranks)  # the most of any rank: all of them give the same capacity
    origins = num_ranks * max_tokens
    most = align(origins * min(topk, num_local) + (alignment - 1) * num_local, alignment) if expand else origins
    origin_of = numbers(rank * max_tokens, max_tokens, _WORDS if rows.is_cuda else 1, device)[: len(rows)]
    # Along with a row: what its token chose, if the row must find itself in there; else the weights, which DeepEP leaves as they are.
    extra = (ids.to(torch.int32),) if expand else () if weights is None else (weights.to(torch.float32),)
    side = (origin_of, *map(_whole_words, extra), *(() if sf is None else (sf,)))

    def issue(engine: Any) -> Any:
        return engine.dispatch(
            rows, ids, weights if expand else None, side=side, layout="expert_major" if expand else "rank_major",
            capacity=None if exact else most, expert_alignment=alignment if expand else 1, num_sms=sms(num_sms, rows),
        )  # fmt: skip

    engine, result = engines.dispatch(
        issue, kind="elastic", num_experts=num_experts, tokens=max_tokens, row_bytes=row_bytes(rows, topk), topk=topk,
        side_bytes=4 * _WORDS + 8 * align(topk, _WORDS) + side_bytes(sf), device=device, rows_come_back=2 if expand and not multiple else 0,
    )  # fmt: skip
    # Copies of what is small: an array of a result keeps all of its memory, rows included.
    x, counts, origin = result.x.contiguous(), result.expert_counts.clone(), result.side[0][:, 0].clone()
    got_idx, got_weights = None, None
    if expand:
        late = _late_of_expanded(result, len(x), counts, origin, first_experts(num_experts, num_ranks)[rank], origins, max_tokens, topk, exact)
        if weights is not None:
            got_weights = result.topk_weights.clone()
    else:
        local = result.topk_idx.clone()
        if not exact:
            local.masked_fill_(tail(most, result.num_rows, device), -1)
        late = _late_of_tokens(result, counts, origin, local, max_tokens, alignment, num_ranks)
        got_idx = local.to(ids.dtype, copy=True)
        if weights is not None:
            got_weights = result.side[1][:, :topk].clone()
    late["dst_buffer_slot_idx"] = lambda made: slots(made.topk_idx, num_experts, num_ranks, rank * max_tokens)
    handle = EPHandle(
        engine, result.handle, expand, late, do_expand=expand, num_experts=num_experts, expert_alignment=alignment, num_max_tokens_per_rank=max_tokens,
        num_sms=num_sms, topk_idx=ids, num_expanded_tokens=len(x) if expand else 0, num_unaligned_recv_tokens_per_expert=counts,
        num_recv_tokens_per_expert_list=[align(count, alignment) for count in counts.tolist()] if exact else [],
    )  # fmt: skip
    got_sf = None if sf is None else _scales(result.side[-1], column_major)
    if zero_padding and expand:
        for each in (x, got_weights, got_sf):
            if each is not None:
                _clear(each, handle._expanded.is_row)
    return Received(x, got_sf, got_idx, got_weights, handle)


Late = dict[str, Callable[[EPHandle], Any]]


def _late_of_expanded(
    result: Any, rows: int, counts: Tensor, origin: Tensor, first_expert: int, origins: int, max_tokens: int, topk: int, exact: bool
) -> Late:
    offsets, chosen = result.expert_offsets.clone(), result.side[1][:, :topk].clone()
    return {
        "_expanded": lambda handle: expanded_rows(rows, counts, offsets, origin, chosen, first_expert, origins),
        "_tokens": lambda handle: source_metadata(handle._expanded, origins, max_tokens, topk, exact),
        "recv_src_metadata": lambda handle: handle._tokens[0],
        "num_recv_tokens": lambda handle: len(handle._tokens[0]),
        "psum_num_recv_tokens_per_scaleup_rank": lambda handle: handle._tokens[1][max_tokens - 1 :: max_tokens].to(torch.int32),
        "psum_num_recv_tokens_per_expert": lambda handle: (offsets[:-1] + counts).to(torch.int32),
    }


def _late_of_tokens(
    result: Any, counts: Tensor, origin: Tensor, local_ids: Tensor, max_tokens: int, alignment: int, num_ranks: int
) -> Late:
    sources = sources_of(result)
    return {
        "_recv_topk_idx": lambda handle: local_ids,
        "recv_src_metadata": lambda handle: _metadata(origin, local_ids, max_tokens),
        "num_recv_tokens": lambda handle: len(origin),
        "psum_num_recv_tokens_per_scaleup_rank": lambda handle: ends_of_sources(sources, num_ranks),
        "psum_num_recv_tokens_per_expert": lambda handle: ((counts + alignment - 1) // alignment * alignment).cumsum(0).to(torch.int32),
    }


def dispatch_again(handle: EPHandle, rows: Tensor, sf: Tensor | None, weights: Tensor | None, num_sms: int, column_major: bool) -> Received:
    side = [each for each in (None if weights is None else weights.to(torch.float32), sf) if each is not None]
    result = handle._engine.dispatch(rows, handle=handle._routing, side=side, num_sms=sms(num_sms or handle.num_sms, rows))
    x = result.x.contiguous()
    got_idx = None if handle._is_expanded else handle._recv_topk_idx.to(handle.topk_idx.dtype, copy=True)
    got_weights = None
    if weights is not None:
        got_weights = result.side[0].contiguous()
        if handle._is_expanded:
            got_weights = got_weights.gather(1, handle._expanded.k[:, None])[:, 0].masked_fill_(~handle._expanded.is_row, 0)
    return Received(x, None if sf is None else _scales(result.side[-1], column_major), got_idx, got_weights, handle)


def combine_call(
    handle: EPHandle, rows: Tensor, weights: Tensor | None, biases: tuple[Tensor, ...], num_sms: int, multiple: bool
) -> tuple[Tensor, Tensor | None]:
    engine, routing, number = handle._engine, handle._routing, sms(num_sms, rows)
    if handle._is_expanded and not handle.do_expand:
        # Reduced by the caller, who says so by taking do_expand back: one row per token stands for all of its expanded ones.
        rows, weights = _spread(handle._expanded, handle.recv_src_metadata, rows, weights)
    wire = "payload" if multiple or not handle._is_expanded else "rows"
    out = torch.empty((routing.num_tokens, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    if biases and rows.dtype in (torch.bfloat16, torch.float16):
        combined = None
        if weights is not None:
            combined = engine.combine(rows[:, :1], routing, side=weights, num_sms=number).side.contiguous()
        if handle._is_expanded and multiple:
            # What is added here already is rounded before it crosses, with a bias as without.
            rows, _ = _spread(handle._expanded, handle.recv_src_metadata, _fold(handle.recv_src_metadata, rows), None)
        sum_wide(engine, routing, rows, biases, number, out, wire)
        return out, combined
    got = engine.combine(rows, routing, side=weights, wire=wire, out=out, num_sms=number)
    for each in biases:
        out += each
    return out, None if weights is None else got.side.contiguous()


def _metadata(origin: Tensor, local_ids: Tensor, max_tokens: int) -> Tensor:
    """recv_src_metadata where rows are tokens."""
    topk = local_ids.shape[1]
    made = torch.full((len(origin), topk + 2), -1, dtype=torch.int32, device=origin.device)
    made[:, 0] = origin
    if topk:
        made[:, 1] = origin // max_tokens * topk + (local_ids >= 0).to(torch.int8).argmax(1)
    return made


def _whole_words(side: Tensor) -> Tensor:
    """On a GPU, columns that make words of 16 bytes: such arrays travel with the rows, others need a kernel that is slower."""
    return torch.nn.functional.pad(side, (0, -side.shape[1] % _WORDS)) if side.is_cuda and side.shape[1] % _WORDS else side


def _fold(metadata: Tensor, rows: Tensor) -> Tensor:
    """The sum of each token's expanded rows, in fp32 and in the order of k."""
    places = metadata[:, 2:].to(torch.int64)
    total = torch.zeros((len(places), rows.shape[1]), dtype=torch.float32, device=rows.device)
    for place in places.t():
        total += torch.where((place >= 0)[:, None], rows[place.clamp(min=0)], 0)
    return total.to(rows.dtype)


def _spread(expanded: Expanded, metadata: Tensor, rows: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Each token's row where the first of its expanded rows was, zeros in the others; weights [N, K] where they belong."""
    places = metadata[:, 2:].to(torch.int64)
    first = (places >= 0).to(torch.int8).argmax(1)
    spread = rows.new_zeros((len(expanded.origin) + 1, rows.shape[1]))
    place = places.gather(1, first[:, None])[:, 0]
    spread[torch.where(place < 0, len(expanded.origin), place)] = rows[: len(places)]
    if weights is None:
        return spread[:-1], None
    apart = weights.new_zeros(len(expanded.origin) + 1)
    apart[torch.where(places < 0, len(expanded.origin), places)] = weights[: len(places)]
    return spread[:-1], apart[:-1]


def _clear(rows: Tensor, is_row: Tensor) -> None:
    words = rows.view(torch.uint8) if rows.element_size() == 1 else rows
    words.masked_fill_(~is_row if rows.dim() == 1 else ~is_row[:, None], 0)


def _scales(arrived: Tensor, column_major: bool) -> Tensor:
    if not column_major:
        return arrived.contiguous()
    rows, packs = arrived.shape
    turned = torch.empty((packs, align(rows, 4)), dtype=arrived.dtype, device=arrived.device).t()[:rows]
    turned.copy_(arrived)
    return turned
