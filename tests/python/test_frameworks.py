"""Arrays of torch, JAX and of anything with DLPack go in; results come back as what went in."""

import gc

import ml_dtypes
import numpy as np
import pytest
import turnout
from support import HIDDEN, make_buffer, one_rank, problem

torch = pytest.importorskip("torch")


def tensors(rank, tokens=None, dtype=torch.float32):
    x, idx, weights = problem(rank, tokens)
    return torch.from_numpy(x).to(dtype), torch.from_numpy(idx), torch.from_numpy(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(dtype):
    def body(communicator):
        buffer = make_buffer(communicator, dtype=torch.float64)
        x, idx, weights = tensors(communicator.rank, dtype=dtype)
        got = buffer.dispatch(x, idx, weights, layout="expert_major")
        for array, kind in [(got.x, dtype), (got.topk_weights, torch.float32), (got.expert_counts, torch.int32), (got.expert_offsets, torch.int64)]:
            assert isinstance(array, torch.Tensor) and array.dtype == kind
        back = buffer.combine(got.x, got.handle, weights="source")
        assert back.x.dtype == dtype and torch.equal(back.x, (x * (weights * (idx >= 0)).sum(1, keepdim=True)).to(dtype))

    turnout.run_virtual_ranks(3, body)


def test_torch_fp8_and_row_strides():
    buffer = one_rank(dtype="bf16", hidden=256)
    wide = torch.ones(4, 512, dtype=torch.bfloat16)
    got = buffer.dispatch(wide[:, ::2][:, :1].expand(4, 1).contiguous(), torch.zeros(4, 1, dtype=torch.int32))
    assert got.x.shape == (4, 1)
    got = buffer.dispatch(wide[:, :256], torch.zeros(4, 1, dtype=torch.int32), quantize="fp8_e4m3_ue8m0")
    assert got.x.dtype == torch.float8_e4m3fn and got.x_scales.dtype == torch.float8_e8m0fnu and got.x_scales.shape == (4, 2)
    assert torch.equal(got.x.float() * got.x_scales.float().repeat_interleave(128, 1), torch.ones(4, 256))
    again = buffer.dispatch(got.x, torch.zeros(4, 1, dtype=torch.int64))
    assert again.x.dtype == torch.float8_e4m3fn and torch.equal(again.x.view(torch.uint8), got.x.view(torch.uint8))


def test_a_tensor_keeps_its_lease():
    buffer = one_rank()
    x, idx, _ = tensors(0, 32)
    rows = buffer.dispatch(x, idx).x[2:5]
    gc.collect()
    want = rows.clone()
    for _ in range(8):
        buffer.dispatch(x + 1, idx)
    assert torch.equal(rows, want)


def test_torch_that_requires_grad():
    buffer = one_rank()
    x, idx, weights = tensors(0)
    with pytest.raises(turnout.InvalidArgument, match=r"x is float32\[5, 48\] \(torch\) that requires grad.*x.detach\(\).*turnout.torch"):
        buffer.dispatch(x.requires_grad_(), idx, weights)
    with pytest.raises(turnout.InvalidArgument, match="topk_weights is .* that requires grad"):
        buffer.dispatch(x.detach(), idx, torch.nn.Parameter(weights))
    with torch.no_grad():
        assert buffer.dispatch(x, idx, weights).x.requires_grad is False


def test_torch_that_cannot_be_used():
    buffer = one_rank()
    x, idx, _ = tensors(0)
    for bad, words in [
        (x.to_sparse(), "x is float32"),
        (x.to("meta"), "memory of the CPU"),
        (x.to(torch.int16), r"x is int16\[5, 48\] \(torch\)"),
        (x.T.contiguous().T, r"strides \[1, 5\].*x.contiguous\(\)"),
        (x.to(torch.complex64), "x is complex64"),
    ]:
        with pytest.raises(turnout.InvalidArgument, match=words):
            buffer.dispatch(bad, idx)
    with pytest.raises(turnout.InvalidArgument, match=r"topk_idx is .*, but must be i32 or i64"):
        buffer.dispatch(x, idx.float())


def test_frameworks_mix():
    buffer = one_rank()
    x, idx, weights = problem(0)
    got = buffer.dispatch(torch.from_numpy(x), idx, torch.from_numpy(weights))
    assert isinstance(got.x, torch.Tensor) and isinstance(got.topk_idx, torch.Tensor)
    assert isinstance(buffer.combine(got.x.numpy(), got.handle).x, np.ndarray)


class Foreign:
    """An array of a library that Turnout never heard of."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_others_get_what_dlpack_takes():
    buffer = one_rank()
    x, idx, weights = problem(0)
    got = buffer.dispatch(Foreign(x), Foreign(idx), Foreign(weights))
    assert isinstance(got.x, turnout.Array) and got.x.shape[1] == HIDDEN and got.x.dtype == np.float32 and got.x.device == "cpu"
    assert got.x.__dlpack_device__() == (1, 0) and "fp32" in repr(got.x)
    rows = torch.from_dlpack(got.x)
    assert np.array_equal(np.asarray(got.x), rows.numpy()) and np.from_dlpack(got.x).ctypes.data == got.x.data_ptr
    back = buffer.combine(got.x, got.handle)  # an Array goes in, too
    assert np.array_equal(np.asarray(back.x), x * (idx >= 0).any(1, keepdims=True))
    with pytest.raises(BufferError, match="copies"):
        got.x.__dlpack__(copy=True)
    del got
    gc.collect()
    assert np.array_equal(rows.numpy()[:1], x[(idx >= 0).any(1)][:1])


def test_bits_of_bf16_by_dlpack():
    buffer = one_rank(dtype="bf16")
    bits = np.arange(4 * HIDDEN, dtype=np.uint16).reshape(4, HIDDEN)
    got = buffer.dispatch(turnout.array(Foreign(bits), "bf16"), np.zeros((4, 1), np.int32))
    assert got.x.dtype == ml_dtypes.bfloat16 and np.array_equal(np.asarray(got.x).view(np.uint16), bits)
    with pytest.raises(turnout.InvalidArgument, match="sizes differ"):
        buffer.dispatch(turnout.array(Foreign(bits), "fp32"), np.zeros((4, 1), np.int32))


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    buffer = one_rank(dtype="bf16")
    x, idx, weights = problem(0)
    got = buffer.dispatch(jax.numpy.asarray(x, jax.numpy.bfloat16), jax.numpy.asarray(idx, jax.numpy.int32), jax.numpy.asarray(weights))
    assert got.x.dtype == ml_dtypes.bfloat16
    back = buffer.combine(got.x, got.handle)
    assert np.array_equal(np.asarray(back.x).astype(np.float32), x * (idx >= 0).any(1, keepdims=True))
    assert np.array_equal(np.asarray(jax.dlpack.from_dlpack(got.expert_counts)), np.asarray(got.expert_counts))


def test_torchs_allocator_is_told_of_the_stream_that_was_given(monkeypatch):
    from turnout import _streams

    class Tensor:
        def __init__(self):
            self.readers = []

        def record_stream(self, stream):
            self.readers.append(stream)

    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: ("stream", stream, device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    tensors = [Tensor(), Tensor()]
    for stream in (0x7F00, 0, 1):  # 0 and 1 are the default stream
        _streams.keep(tensors, stream, 3)
    for tensor in tensors:
        assert tensor.readers == [("stream", 0x7F00, 3), ("default", 3), ("default", 3)]
