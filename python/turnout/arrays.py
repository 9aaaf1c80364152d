"""Arrays whose framework has no name for their elements."""

from __future__ import annotations

import sys
from typing import Any

from . import _core
from .errors import InvalidArgument

_NUMPY_NAMES = {
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "ue8m0": "float8_e8m0fnu",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "u8": "uint8",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
}


def array(x: Any, dtype: str) -> Any:
    """Says what the bytes of `x` are: turnout.array(bits, dtype='bf16') for uint16 that hold bf16. Nothing is copied.

    dtype: 'u8', 'i8', 'i32', 'i64', 'fp8_e4m3', 'fp8_e5m2', 'ue8m0', 'fp16', 'bf16', 'fp32' or 'fp64', of the size of x's elements.
    Returns a view of NumPy (ml_dtypes) or torch, or, of any other array with DLPack, something that Buffer's calls take.
    Raises InvalidArgument if the sizes differ or there is no such type.
    """
    if dtype not in _NUMPY_NAMES:
        raise InvalidArgument(f"array: dtype is {dtype!r}, but must be one of {', '.join(_NUMPY_NAMES)}")
    name = _NUMPY_NAMES[dtype]
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(x, numpy.ndarray):
        import ml_dtypes

        wanted = numpy.dtype(getattr(ml_dtypes, name, name))
        _require_same_size(x.dtype.itemsize, wanted.itemsize, x.dtype, dtype)
        return x.view(wanted)
    if torch is not None and isinstance(x, torch.Tensor):
        if not hasattr(torch, name):
            raise InvalidArgument(f"array: this torch ({torch.__version__}) has no {name}: use a newer one, or NumPy")
        wanted = getattr(torch, name)
        _require_same_size(x.element_size(), wanted.itemsize, x.dtype, dtype)
        return x.view(wanted)
    return _core.Tagged(x, dtype)


def _require_same_size(have: int, want: int, came: object, dtype: str) -> None:
    if have != want:
        raise InvalidArgument(f"array: x is {came}, whose elements have {have} bytes, but {dtype} has {want}")
