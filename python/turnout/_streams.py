"""Order between streams of a GPU, by the framework that is there."""

from __future__ import annotations

import sys
from typing import Any


def order(producer: int, consumer: int, device: int) -> None:
    """Makes stream `consumer` wait for what has been issued to stream `producer`; both are integers, 0 and 1 the default stream."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        first, then = _torch_stream(torch, producer, device), _torch_stream(torch, consumer, device)
        then.wait_stream(first)
    elif cupy is not None:
        with cupy.cuda.Device(device):
            event = cupy.cuda.ExternalStream(_native(producer)).record()
            cupy.cuda.ExternalStream(_native(consumer)).wait_event(event)
    else:
        raise BufferError("this array is in order of another stream: give the stream of the consumer to the call (stream=...)")


def keep(tensors: list[Any], stream: int, device: int) -> None:
    """Tells torch's allocator that `stream` reads these tensors, so that their memory is not given to others before it has."""
    import torch

    reader = _torch_stream(torch, stream, device)
    for tensor in tensors:
        tensor.record_stream(reader)


def _native(stream: int) -> int:
    return 0 if stream == 1 else stream


def _torch_stream(torch: Any, stream: int, device: int) -> Any:
    return torch.cuda.default_stream(device) if _native(stream) == 0 else torch.cuda.ExternalStream(stream, device=device)
