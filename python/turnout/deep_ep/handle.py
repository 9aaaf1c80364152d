"""EPHandle: the routing of a dispatch of the second interface, with attributes that frameworks read and set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["EPHandle", "Expanded", "expanded_rows", "source_metadata"]


class EPHandle:
    """R ranks, Le local experts, M most tokens of a rank. Attributes may be read and set. Some are made when they are first read, which is not
    free. Without a wait for counts numbers of rows are the most there can be."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor  #: [T, K] as it was given
    num_recv_tokens: int
    num_expanded_tokens: int  #: 0 unless expanded
    num_recv_tokens_per_expert_list: list[int]  #: rounded up to expert_alignment; empty without a wait for counts
    psum_num_recv_tokens_per_scaleup_rank: Tensor  #: int32 [R]: rows of the ranks up to this one
    psum_num_recv_tokens_per_expert: Tensor  #: int32 [Le]: end of each expert's rows (expanded), else sums of rounded counts
    num_unaligned_recv_tokens_per_expert: Tensor  #: int32 [Le]
    recv_src_metadata: Tensor  #: int32 [N, K + 2]: source rank * M + token, source rank * K + its first k here, expanded row of each k or -1
    dst_buffer_slot_idx: Tensor  #: int32 [T, K]: this rank * M + place among its rows on the rank of the expert; -1: none, or not the first k there
    token_metadata_at_forward: Tensor | None = None  #: DeepEP's own, as the two below
    channel_linked_list: Tensor | None = None
    cached_recv_src_metadata_before_sort: Tensor | None = None

    def __init__(self, engine: Any, routing: Any, is_expanded: bool, late: dict[str, Callable[[EPHandle], Any]], **known: Any) -> None:
        # late: functions of the handle, which do not hold it.
        self._engine, self._routing, self._is_expanded, self._late = engine, routing, is_expanded, late
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        late = self.__dict__.get("_late", {})
        if name not in late:
            raise AttributeError(f"EPHandle has no attribute {name!r}")
        value = self.__dict__[name] = late[name](self)
        return value


@dataclass(eq=False)
class Expanded:
    """What the rows of an expanded result are."""

    is_row: Tensor  #: bool [rows]: not padding
    k: Tensor  #: int64 [rows]: place of its expert in its token's top-k
    origin: Tensor  #: int64 [rows]: source rank * M + token, R * M for padding


def expanded_rows(rows: int, counts: Tensor, offsets: Tensor, origin: Tensor, ids: Tensor, first_expert: int, num_origins: int) -> Expanded:
    """counts [Le] and offsets [Le + 1] of the groups; origin [rows] and ids [rows, K], of all experts, as they came with the rows."""
    place = torch.arange(rows, device=origin.device)
    group = torch.searchsorted(offsets[1:].contiguous(), place, right=True).clamp_(max=max(0, len(counts) - 1))
    if len(counts) == 0:
        is_row = torch.zeros(rows, dtype=torch.bool, device=origin.device)
    else:
        is_row = place < (offsets[:-1] + counts)[group]
    k = (ids == (first_expert + group)[:, None]).to(torch.int8).argmax(1) if ids.shape[1] else torch.zeros_like(place)
    return Expanded(is_row, k, torch.where(is_row, origin.to(torch.int64), num_origins))


def source_metadata(expanded: Expanded, num_origins: int, max_tokens: int, topk: int, exact: bool) -> tuple[Tensor, Tensor]:
    """recv_src_metadata of an expanded result, tokens by origin, and how many tokens came of each origin up to each (inclusive sums).

    Shapes depend on nothing that came unless `exact`, which waits for the number of tokens."""
    device = expanded.origin.device
    table = torch.full((num_origins + 1, topk), -1, dtype=torch.int64, device=device)
    table[expanded.origin, expanded.k] = torch.arange(len(expanded.origin), device=device)
    came = torch.zeros(num_origins + 1, dtype=torch.int64, device=device)
    came[expanded.origin] = 1
    came, table = came[:-1], table[:-1]
    sums = came.cumsum(0)
    tokens = int(sums[-1]) if exact else num_origins
    made = torch.full((tokens + 1, topk + 2), -1, dtype=torch.int32, device=device)
    place = torch.where(came > 0, sums - 1, tokens)
    origin = torch.arange(num_origins, device=device)
    first = (table >= 0).to(torch.int8).argmax(1)
    made[place] = torch.cat([origin[:, None], (origin // max_tokens * topk + first)[:, None], table], 1).to(torch.int32)
    return made[:-1], sums
