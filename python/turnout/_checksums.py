"""Checksums of rows that travel beside them, for arrays of NumPy and torch.

A row's bytes, each times an odd number of its place, added up in 31 bits: a byte that changed, or two that changed places, show.
"""

from __future__ import annotations

import sys
from typing import Any

NUM_BYTES = 4


def can_check(x: Any) -> bool:
    return _is_of("numpy", "ndarray", x) or _is_of("torch", "Tensor", x)


def of(x: Any) -> Any:
    """int32 [..., 1] of rows [..., H]."""
    if _is_of("torch", "Tensor", x):
        import torch

        data = x.detach().contiguous().view(torch.uint8).to(torch.int64)
        places = torch.arange(data.shape[-1], device=x.device, dtype=torch.int64)
        return (_sum_of(data, places) & 0x7FFFFFFF)[..., None].to(torch.int32)
    import numpy as np

    data = np.ascontiguousarray(x).view(np.uint8).astype(np.int64)
    return (_sum_of(data, np.arange(data.shape[-1], dtype=np.int64)) & 0x7FFFFFFF)[..., None].astype(np.int32)


def first_wrong(result: Any) -> int | list[int] | None:
    """The first row of a dispatch whose checksum, the last of its side arrays, is not that of the row; of a slab [expert, row]."""
    present: list[tuple[Any, bool]]
    wrong = (of(result.x) != result.side[-1])[..., 0].tolist()
    counts, starts = result.expert_counts.tolist(), result.expert_offsets.tolist()
    if result.x.ndim == 3:
        present = [([expert, row], wrong[expert][row]) for expert, count in enumerate(counts) for row in range(count)]
    elif result.sorted_rows is None:
        # Between the groups of expert_major there may be rows that nobody sent.
        present = [(row, wrong[row]) for start, count in zip(starts, counts) for row in range(start, start + count)]
    else:
        present = list(enumerate(wrong[: int(result.num_rows[0])]))
    return next((place for place, is_wrong in present if is_wrong), None)


def _sum_of(data: Any, places: Any) -> Any:
    """At most 2^8 x 2^24 a byte, so that 2^31 bytes do not overflow."""
    return (data * ((places * 2654435 & 0x7FFFFF) * 2 + 1)).sum(-1) + 1


def _is_of(module: str, name: str, x: Any) -> bool:
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name))
