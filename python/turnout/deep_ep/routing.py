"""Who has which expert, and what follows of it for tokens; all of it stays on the tensors' device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["align", "first_experts", "layout", "numbers", "owners", "slots", "tail"]

_NODE = 8  # ranks of a node, as DeepEP counts


def align(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def first_experts(num_experts: int, num_ranks: int) -> list[int]:
    """The first expert of every rank, and num_experts: in order, the first ranks hold one more if they do not divide."""
    each, more = divmod(num_experts, num_ranks)
    return [rank * each + min(rank, more) for rank in range(num_ranks + 1)]


@functools.lru_cache(maxsize=64)
def owners(num_experts: int, num_ranks: int, device: torch.device) -> Tensor:
    """The rank of every expert, int64; one element more than experts, so that id -1 has rank num_ranks."""
    firsts = first_experts(num_experts, num_ranks)
    table = [rank for rank in range(num_ranks) for _ in range(firsts[rank + 1] - firsts[rank])]
    return torch.tensor([*table, num_ranks], device=device)


_numbers: dict[tuple[int, int, int, torch.device], Tensor] = {}


def numbers(first: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """int32 [rows, columns]: first, first + 1, ... in every column. Kept for good, because graphs may have been captured with it."""
    key = (first, rows, columns, device)
    made = _numbers.get(key)
    if made is None:
        made = torch.arange(first, first + rows, dtype=torch.int32, device=device)[:, None].expand(rows, columns).contiguous()
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return made  # the graph's: nothing is in it before a replay
            torch.cuda.current_stream(device).synchronize()  # calls on other streams find it, too
        _numbers[key] = made
    return made


def layout(ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """num_tokens_per_rank, num_tokens_per_rdma_rank (None: one node), num_tokens_per_expert, is_token_in_rank."""
    wide = ids.to(torch.int64)
    known = torch.where(wide < 0, num_experts, wide)
    flat = known.flatten()
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:-1]
    to_rank = owners(num_experts, num_ranks, ids.device)[known]
    in_rank = torch.zeros((ids.shape[0], num_ranks + 1), dtype=torch.bool, device=ids.device).scatter_(1, to_rank, True)[:, :num_ranks].contiguous()
    per_node = None
    if num_ranks > _NODE:
        padded = torch.nn.functional.pad(in_rank, (0, -num_ranks % _NODE))
        per_node = padded.view(len(ids), padded.shape[1] // _NODE, _NODE).any(2).sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_node, per_expert, in_rank


def slots(ids: Tensor, num_experts: int, num_ranks: int, first: int) -> Tensor:
    """int32 [T, K]: first + place of the token among those that go to the rank of its expert; -1 where there is none, or an earlier k leads there."""
    known = torch.where(ids < 0, num_experts, ids.to(torch.int64))
    to_rank = owners(num_experts, num_ranks, ids.device)[known]
    in_rank = torch.zeros((ids.shape[0], num_ranks + 1), dtype=torch.int64, device=ids.device).scatter_(1, to_rank, 1)
    place = (in_rank.cumsum(0) - 1).gather(1, to_rank)
    again = (to_rank[:, :, None] == to_rank[:, None, :]).tril(-1).any(2)
    return torch.where((to_rank == num_ranks) | again, -1, first + place).to(torch.int32)


def ids_of_ranks(in_rank: Tensor, num_experts: int) -> Tensor:
    """A choice of experts that leads to these ranks, for callers who know no more: the first expert of each."""
    num_ranks = in_rank.shape[1]
    first = torch.tensor(first_experts(num_experts, num_ranks)[:num_ranks], device=in_rank.device)
    return torch.where(in_rank, first, -1).contiguous()


def tail(rows: int, present: Tensor, device: torch.device) -> Tensor:
    """bool [rows, 1]: rows that nothing came for."""
    return (torch.arange(rows, device=device) >= present).unsqueeze(1)
