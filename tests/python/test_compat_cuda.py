"""turnout.compat on a GPU: events, levels, multiprocessors. Skipped without one."""

import os

import pytest
import turnout
from turnout import compat, tuned

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)

EXPERTS, HIDDEN, TOPK = 8, 256, 2


def make(**changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=128, dtype="fp32", max_topk=TOPK, device="cuda:0", timeout=20.0)
    return compat.Buffer(turnout.Communicator.from_env(), **{**config, **changes})


def problem(tokens=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 8, (tokens, HIDDEN), generator=generator).float()
    idx = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    return x.to("cuda:0"), idx.to("cuda:0")


@pytest.fixture(autouse=True)
def first_gpu():
    torch.cuda.set_device(0)


def test_more_multiprocessors_than_there_are():
    buffer, there = make(), torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(turnout.InvalidArgument, match=f"num_sms is {there + 12}, but this GPU has {there} multiprocessors: .* for instance 16"):
        buffer.set_num_sms(there + 12)
    buffer.set_num_sms(16)
    x, idx = problem()
    sent = buffer.dispatch(x, idx, layout="expert_slab", capacity=64)
    assert torch.equal(buffer.combine(sent.x, sent.handle).x, TOPK * x)


@pytest.mark.parametrize("level", [0, 1, 3])
def test_events(level):
    buffer = make()
    buffer.set_optimization_level(level)
    x, idx = problem()
    event = compat.EventOverlap()
    with event.record():
        h = buffer.dispatch_async(x, idx, layout="expert_slab", capacity=64)
    assert h.is_done == (level == 0)
    event.synchronize()
    with event.record():
        out = buffer.combine_async(h.x, h.handle)
    event.current_stream_wait()
    assert torch.equal(out.x, TOPK * x)


def test_a_tuned_file(tmp_path):
    there = torch.cuda.get_device_properties(0).multi_processor_count
    path = tmp_path / "tuned.json"
    tuned.save(path, calls=[({"device": "cuda", "op": "dispatch"}, {"num_sms": 8, "mode": "throughput"}), ({}, {"num_sms": 4})])
    buffer = make(optimization_level=2, tuned_file=str(path))
    assert buffer._options({}, is_dispatch=True) == {"mode": "throughput", "num_sms": 8} and buffer._options({})["num_sms"] == 4
    x, idx = problem()
    sent = buffer.dispatch(x, idx, layout="expert_slab", capacity=64)
    assert torch.equal(buffer.combine(sent.x, sent.handle, mode="throughput").x, TOPK * x)
    tuned.save(path, calls=[({}, {"num_sms": there + 1})])
    with pytest.raises(turnout.InvalidArgument, match=f"num_sms is {there + 1}, but this GPU has {there}"):
        buffer.set_optimization_level(2, str(path))


def test_level_0_finds_a_byte_that_changed(monkeypatch):
    from turnout import _checksums

    buffer = make()
    buffer.set_optimization_level(0)
    x, idx = problem()
    assert len(buffer.dispatch(x, idx, layout="expert_slab", capacity=64).side) == 1
    genuine = _checksums.of

    def wrong_once(rows):
        monkeypatch.setattr(_checksums, "of", genuine)
        sums = genuine(rows)
        sums[4] += 1
        return sums

    monkeypatch.setattr(_checksums, "of", wrong_once)
    with pytest.raises(turnout.TransportError, match="row .* is not what was sent"):
        buffer.dispatch(x, idx, layout="expert_slab", capacity=64)
