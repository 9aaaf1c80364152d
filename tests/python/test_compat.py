"""turnout.compat: overlap by events, settings by their usual names, and the environment of other libraries."""

import os
import subprocess
import sys

import numpy as np
import pytest
import turnout
from support import EXPERTS, HIDDEN, TOPK, problem
from turnout import _checksums, compat


def make(communicator, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    return compat.Buffer(communicator, **{**config, **changes})


def one_rank(**changes):
    return make(turnout.Communicator.from_env(), **changes)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("level", [0, 1])
def test_overlap_gives_what_the_calls_give(num_ranks, level):
    def body(communicator):
        buffer = make(communicator)
        buffer.set_optimization_level(level)
        x, idx, weights = problem(communicator.rank)
        event = compat.EventOverlap()
        with event.record():
            h = buffer.dispatch_async(x, idx, weights, layout="expert_major")
        assert h.is_done == (level == 0)  # level 0 finishes each call
        event.synchronize()
        assert h.is_done
        want = turnout.Buffer.dispatch(buffer, x, idx, weights, layout="expert_major")
        np.testing.assert_array_equal(h.x, want.x)
        np.testing.assert_array_equal(h.expert_counts, want.expert_counts)
        with event.record():
            out = buffer.combine_async(np.array(h.x), h.handle)
        event.synchronize()
        np.testing.assert_array_equal(out.x, x * (idx >= 0).sum(1, keepdims=True))
        return True

    assert turnout.run_virtual_ranks(num_ranks, body) == [True] * num_ranks


def test_events_hold_what_was_issued_while_they_recorded():
    buffer = one_rank(max_outstanding=3)
    x, idx, weights = problem(0)
    outer, inner = compat.EventOverlap(), compat.EventOverlap()
    with outer.record() as recorded:
        assert recorded is outer
        first = buffer.dispatch(x, idx, weights, wait=False)
        with inner.record():
            second = buffer.dispatch_async(x, idx)
    third = buffer.dispatch_async(x, idx)
    outer.current_stream_wait()
    assert (first.is_done, second.is_done, third.is_done) == (True, False, False)
    inner.synchronize()
    assert second.is_done and not third.is_done
    assert third.wait() is third.wait()
    compat.EventOverlap().synchronize()  # of nothing
    with pytest.raises(AttributeError):
        third.no_such_thing


def test_constructor_arguments_are_sizes_of_the_library():
    buffer = one_rank(nvl_buffer_size=1 << 22, rdma_buffer_size=3 << 20)
    assert buffer.config["receive_bytes"] == 1 << 22
    assert buffer.config["staging_bytes"] == 1 << 20  # three calls of one peer
    for arguments, words in [
        (dict(nvl_buffer_size=-1), "nvl_buffer_size is -1, but must be a number of bytes"),
        (dict(nvl_buffer_size=1 << 20, receive_bytes=1 << 20), "one setting"),
        (dict(rdma_buffer_size="1G"), "rdma_buffer_size is '1G'"),
    ]:
        with pytest.raises(turnout.InvalidArgument, match=words):
            one_rank(**arguments)


def test_low_latency_is_what_calls_are_unless_they_say():
    buffer = one_rank(use_low_latency_kernel=True)
    assert buffer._options({})["mode"] == "low_latency" and buffer._options({"mode": "throughput"})["mode"] == "throughput"
    x, idx, _ = problem(0)
    sent = buffer.dispatch(x, idx, layout="expert_slab", capacity=64)
    np.testing.assert_array_equal(buffer.combine(np.array(sent.x), sent.handle).x, x * (idx >= 0).sum(1, keepdims=True))


def test_more_multiprocessors_than_the_gpu_has(monkeypatch):
    buffer = one_rank()
    buffer.set_num_sms(144)  # a CPU has none to count
    monkeypatch.setattr(compat, "_num_multiprocessors", lambda device: 132)
    with pytest.raises(turnout.InvalidArgument, match="num_sms is 144, but this GPU has 132 multiprocessors: .* for instance 16"):
        buffer.set_num_sms(144)
    buffer.set_num_sms(16)
    assert buffer._options({})["num_sms"] == 16 and buffer._options({"num_sms": 24})["num_sms"] == 24
    with pytest.raises(turnout.InvalidArgument, match="num_sms is -1"):
        buffer.set_num_sms(-1)
    buffer.set_optimization_level(3)
    buffer.set_num_sms(144)  # an expert's business, and the call's


def test_levels():
    buffer = one_rank()
    with pytest.raises(turnout.InvalidArgument, match=r"level is 4, but must be one of 0 \(safe, verified\), 1 \(default\), 2 .*, 3"):
        buffer.set_optimization_level(4)
    x, idx, _ = problem(0)
    buffer.set_optimization_level(3)
    assert buffer.dispatch(x, idx).is_lease


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_slab"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_level_0_finds_a_byte_that_changed(layout, framework, monkeypatch):
    buffer = one_rank(dtype="fp32")
    buffer.set_optimization_level(0)
    x, idx, weights = problem(0, tokens=9)
    if framework == "torch":
        torch = pytest.importorskip("torch")
        x, idx, weights = torch.from_numpy(x), torch.from_numpy(idx), torch.from_numpy(weights)
    options = dict(layout=layout, capacity=64, expert_alignment=4 if layout == "expert_major" else 1)
    sent = buffer.dispatch(x, idx, weights, **options)
    assert len(sent.side) == 1
    genuine = _checksums.of

    def of_what_was(x):
        sums = genuine(x)
        monkeypatch.setattr(_checksums, "of", genuine)  # only what is sent along is wrong
        sums[4] += 1
        return sums

    monkeypatch.setattr(_checksums, "of", of_what_was)
    idx[4, 0] = 2
    with pytest.raises(turnout.TransportError, match="row .* is not what was sent"):
        buffer.dispatch(x, idx, weights, **options)


def test_every_change_of_a_byte_and_every_exchange_of_two_shows():
    x = np.random.default_rng(0).integers(0, 255, (64, 40)).astype(np.uint8)
    sums = _checksums.of(x)
    changed = x.copy()
    changed[:, 17] += 1
    assert np.all(_checksums.of(changed) != sums)
    exchanged = x.copy()
    exchanged[:, [3, 30]] = x[:, [30, 3]]
    assert np.all((_checksums.of(exchanged) != sums)[:, 0] == (x[:, 3] != x[:, 30]))


PROGRAM = """
import turnout
buffer = turnout.Buffer(turnout.Communicator.from_env(), num_experts=2, hidden=64, max_tokens_per_rank=4)
turnout.Buffer(turnout.Communicator.from_env(), num_experts=2, hidden=64, max_tokens_per_rank=4)
print(buffer.num_bytes)
"""


def run(**variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TURNOUT_")}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=clean | variables, capture_output=True, text=True)


def test_names_of_other_libraries_in_the_environment():
    plain, ours = run(), run(TURNOUT_STAGING_BYTES="50000000")
    assert plain.stderr == "" and int(ours.stdout) > int(plain.stdout)
    theirs = run(DEEP_EP_RDMA_CHUNK_SIZE="50000000", NVSHMEM_IB_SL="3")
    assert theirs.stdout == ours.stdout
    assert theirs.stderr.count("DEEP_EP_RDMA_CHUNK_SIZE=50000000 is read as TURNOUT_STAGING_BYTES=50000000") == 1
    assert theirs.stderr.count("NVSHMEM_IB_SL=3 is read as TURNOUT_IB_SL=3") == 1 and "no transport here uses InfiniBand" in theirs.stderr
    assert "NVSHMEM_IB_SL is '99'" in run(NVSHMEM_IB_SL="99").stderr
