"""What is asked of arguments before Turnout sees them: each message names the argument, what came and what would do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument

__all__ = ["check_ids", "check_number", "check_rows", "check_tensor", "split"]

_IDS = (torch.int64, torch.int32)
_SCALES = (torch.float32, torch.int32)


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_tensor(call: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...], like: Tensor | None = None) -> Tensor:
    """`value`, if it is a tensor of one of the dtypes (none: any), of that shape (None: any length) and on the device of `like`."""
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{call}: {name} is {describe(value)}, but must be a tensor of torch")
    if dtypes and value.dtype not in dtypes:
        names = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise InvalidArgument(f"{call}: {name} is {describe(value)}, but must be {names}")
    if value.dim() != len(shape) or any(want is not None and have != want for have, want in zip(value.shape, shape)):
        wanted = ", ".join("any" if each is None else str(each) for each in shape)
        raise InvalidArgument(f"{call}: {name} is {describe(value)}, but must be of shape [{wanted}]")
    if like is not None and value.device != like.device:
        raise InvalidArgument(f"{call}: {name} is {describe(value)}, but x is on {like.device}: move it there")
    return value.detach()


def check_ids(call: str, value: Any, x: Tensor) -> Tensor:
    ids = check_tensor(call, "topk_idx", value, _IDS, (x.shape[0], None), x)
    if not ids.is_contiguous():
        raise InvalidArgument(f"{call}: topk_idx is {describe(ids)} with strides {list(ids.stride())}, but must be contiguous: topk_idx.contiguous()")
    return ids


def check_weights(call: str, value: Any, ids: Tensor) -> Tensor:
    return check_tensor(call, "topk_weights", value, (torch.float32, torch.bfloat16), tuple(ids.shape), ids).contiguous()


def check_rows(call: str, x: Any, dtypes: tuple[torch.dtype, ...] = ()) -> Tensor:
    """[rows, hidden], of which the elements of a row are adjacent."""
    rows = check_tensor(call, "x", x, dtypes, (None, None))
    if rows.shape[0] > 0 and rows.shape[1] > 1 and rows.stride(1) != 1:
        raise InvalidArgument(f"{call}: x is {describe(rows)} with strides {list(rows.stride())}, but the elements of a row must be adjacent: x.contiguous()")
    return rows


def split(call: str, x: Any) -> tuple[Tensor, Tensor | None]:
    """Rows, and the scales if there are any: of fp8 they are a pair. Scales may lie in any order."""
    if not isinstance(x, (tuple, list)):
        rows = check_rows(call, x)
        return rows, None
    if len(x) != 2:
        raise InvalidArgument(f"{call}: x is a tuple of {len(x)}, but must be a tensor, or rows and their scales")
    rows = check_rows(call, x[0])
    if rows.element_size() != 1:
        raise InvalidArgument(f"{call}: x is {describe(rows)} with scales, but rows that have scales are of one byte: float8_e4m3fn")
    scales = check_tensor(call, "the scales of x", x[1], _SCALES, (rows.shape[0], None), rows)
    return rows, scales.contiguous()


def check_number(call: str, name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{call}: {name} is {describe(value)}, but must be a whole number, {least} or more")
    return value
