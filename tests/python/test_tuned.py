"""Tuned files: what they say is what calls of level 2 use; what is wrong in one is told by place."""

import json

import numpy as np
import pytest
import turnout
from support import EXPERTS, HIDDEN, TOPK, problem
from turnout import compat, tuned


def make(communicator=None, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    return compat.Buffer(communicator or turnout.Communicator.from_env(), **{**config, **changes})


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNOUT_TUNED_FILE", str(tmp_path / "tuned.json"))
    return tmp_path / "tuned.json"


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TURNOUT_TUNED_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.default_path() == str(tmp_path / "turnout" / "tuned.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert tuned.default_path() == "/home/somebody/.config/turnout/tuned.json"
    monkeypatch.setenv("TURNOUT_TUNED_FILE", "/etc/tuned.json")
    assert tuned.default_path() == "/etc/tuned.json"


def test_what_was_saved_is_loaded(path):
    calls = [({"op": "combine", "max_tokens": [1, 512]}, {"num_sms": 24}), ({}, {"mode": "throughput"})]
    saved = tuned.save(path, calls=calls, buffer={"staging_bytes": 1 << 20}, low_latency_up_to_bytes=4096, made={"by": "a test"})
    assert tuned.load() == saved == tuned.load(path)
    assert saved.calls == tuple(calls) and saved.buffer == {"staging_bytes": 1 << 20} and saved.low_latency_up_to_bytes == 4096
    assert [entry.name for entry in path.parent.iterdir()] == ["tuned.json"]


def settings(monkeypatch, buffer):
    """Mode and num_sms of a dispatch and a combine as they reach the library."""
    seen = []

    def dispatch(self, *arguments, **options):
        seen.append((options["mode"], options["num_sms"]))
        return genuine_dispatch(self, *arguments, **options)

    def combine(self, *arguments, **options):
        seen.append((options["mode"], options["num_sms"]))
        return genuine_combine(self, *arguments, **options)

    genuine_dispatch, genuine_combine = turnout.Buffer.dispatch, turnout.Buffer.combine
    with monkeypatch.context() as patched:
        patched.setattr(turnout.Buffer, "dispatch", dispatch)
        patched.setattr(turnout.Buffer, "combine", combine)
        x, idx, weights = problem(0)
        sent = buffer.dispatch(x, idx, weights, layout="expert_major")
        sums = buffer.combine(np.array(sent.x), sent.handle)
        np.testing.assert_array_equal(sums.x, x * (idx >= 0).sum(1, keepdims=True))
        buffer.dispatch(x, handle=sent.handle)
        buffer.dispatch(x, idx, mode="throughput", num_sms=7)
    return seen


def test_calls_use_what_fits_them_first(path, monkeypatch):
    tuned.save(
        path,
        calls=[
            ({"op": "dispatch", "layout": "rank_major"}, {"num_sms": 99}),
            ({"op": "dispatch", "layout": "expert_major", "max_tokens": [64, 64], "dtype": "fp32", "device": "cpu"}, {"num_sms": 12}),
            ({"op": "dispatch", "hidden": [HIDDEN + 1, 9999]}, {"mode": "throughput"}),
            ({"op": "combine", "wire": "payload", "num_ranks": [1, 1]}, {"num_sms": 20, "mode": "throughput"}),
            ({}, {"num_sms": 5, "mode": "low_latency"}),
        ],
    )
    buffer = make()
    assert settings(monkeypatch, buffer) == [("auto", 0), ("auto", 0), ("auto", 0), ("throughput", 7)]
    buffer.set_optimization_level(2)
    assert settings(monkeypatch, buffer) == [("low_latency", 12), ("throughput", 20), ("low_latency", 12), ("throughput", 7)]
    buffer.set_num_sms(3)  # what the program says goes before the file
    assert settings(monkeypatch, buffer)[:2] == [("low_latency", 3), ("throughput", 3)]
    buffer.set_optimization_level(1)
    assert settings(monkeypatch, buffer)[:2] == [("auto", 3), ("auto", 3)]


def test_the_threshold_between_the_modes(path, monkeypatch):
    largest = 64 * HIDDEN * 4
    for threshold, mode in ((largest, "low_latency"), (largest - 1, "throughput")):
        tuned.save(path, low_latency_up_to_bytes=threshold)
        assert settings(monkeypatch, make(optimization_level=2))[:3] == [(mode, 0)] * 3
        assert settings(monkeypatch, make(optimization_level=2, use_low_latency_kernel=True))[0] == ("low_latency", 0)


def test_settings_of_a_buffer(path):
    tuned.save(path, buffer={"staging_bytes": 3 << 20, "receive_bytes": 5 << 20, "num_threads": 2})
    plain, level2 = make(), make(optimization_level=2)
    assert level2.config["staging_bytes"] == 3 << 20 and level2.config["receive_bytes"] == 5 << 20 and level2.config["num_threads"] == 2
    assert plain.config["staging_bytes"] == 0 and level2.num_bytes > plain.num_bytes
    told = make(optimization_level=2, nvl_buffer_size=6 << 20, num_threads=1)
    assert told.config["receive_bytes"] == 6 << 20 and told.config["num_threads"] == 1


BAD = {
    "not JSON": ("{", "it is not JSON"),
    "no object": ("[]", r"it is \[\], but must be an object with schema"),
    "schema": ({"schema": 2}, "schema is 2, but this version reads 1"),
    "no schema": ({}, "schema is None"),
    "unknown word": ({"schema": 1, "call": []}, "there is no 'call': use schema, made, buffer"),
    "calls": ({"schema": 1, "calls": {}}, "calls is {}, but must be a list"),
    "entry": ({"schema": 1, "calls": [3]}, r"calls\[0\]: it is 3"),
    "empty use": ({"schema": 1, "calls": [{"when": {}}]}, r"calls\[0\]: use is empty"),
    "tokens of one rank": ({"schema": 1, "calls": [{"when": {"tokens": [0, 1]}, "use": {"num_sms": 1}}]}, "there is no 'tokens': use op"),
    "pair": ({"schema": 1, "calls": [{"when": {"hidden": 7168}, "use": {"num_sms": 1}}]}, r"hidden is 7168, but must be \[least, most\]"),
    "pair upside down": ({"schema": 1, "calls": [{"when": {"hidden": [2, 1]}, "use": {"num_sms": 1}}]}, r"hidden is \[2, 1\]"),
    "layout": ({"schema": 1, "calls": [{"when": {"layout": "slab"}, "use": {"num_sms": 1}}]}, "layout is 'slab', but must be one of rank_major"),
    "mode": ({"schema": 1, "calls": [{"use": {"num_sms": 1}}, {"use": {"mode": "fast"}}]}, r"calls\[1\]: use: mode is 'fast'"),
    "num_sms": ({"schema": 1, "calls": [{"use": {"num_sms": True}}]}, "num_sms is True, but must be a whole number from 0 to 1024"),
    "buffer": ({"schema": 1, "buffer": {"hidden": 3}}, "buffer: there is no 'hidden': use staging_bytes"),
    "bytes": ({"schema": 1, "buffer": {"staging_bytes": 0}}, "buffer: staging_bytes is 0"),
    "threshold": ({"schema": 1, "low_latency_up_to_bytes": -1}, "low_latency_up_to_bytes is -1"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_in_a_file(what, path):
    content, words = BAD[what]
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    buffer = make()
    with pytest.raises(turnout.InvalidArgument, match=words) as caught:
        buffer.set_optimization_level(2)
    assert str(path) in str(caught.value)
    x, idx, _ = problem(0)
    buffer.dispatch(x, idx)  # the level is as it was
    assert buffer._level == 1


def test_no_file(path):
    with pytest.raises(turnout.InvalidArgument, match="tuned.json: it cannot be read: No such file.*TURNOUT_TUNED_FILE names another; docs/tuned.md"):
        make().set_optimization_level(2)
    with pytest.raises(turnout.InvalidArgument, match="tuned_file is 'x', but level is 1"):
        make().set_optimization_level(1, tuned_file="x")


def test_a_file_of_another_gpu(path, monkeypatch):
    tuned.save(path, calls=[({}, {"num_sms": 100}), ({}, {"num_sms": 144})])
    monkeypatch.setattr(compat, "_num_multiprocessors", lambda device: 132)
    with pytest.raises(turnout.InvalidArgument, match=r"calls\[1\]: use: num_sms is 144, but this GPU has 132 multiprocessors: the file is another GPU's"):
        make().set_optimization_level(2)


def test_a_rank_without_the_file_is_told_on_all(tmp_path):
    tuned.save(tmp_path / "there.json")

    def body(communicator):
        name = "missing.json" if communicator.rank == 1 else "there.json"
        with pytest.raises(turnout.InvalidArgument, match="cannot be read" if communicator.rank == 1 else "refused by rank 1"):
            make(communicator, optimization_level=2, tuned_file=str(tmp_path / name))
        with pytest.raises(turnout.InvalidArgument, match="rdma_buffer_size is -1" if communicator.rank == 1 else "refused by rank 1"):
            make(communicator, rdma_buffer_size=-communicator.rank)
        make(communicator)

    turnout.run_virtual_ranks(2, body)


def test_ranks_that_read_different_modes_raise(tmp_path):
    for mode in ("throughput", "low_latency"):
        tuned.save(tmp_path / f"{mode}.json", calls=[({}, {"mode": mode})])

    def body(communicator):
        buffer = make(communicator, optimization_level=2, tuned_file=str(tmp_path / f"{['throughput', 'low_latency'][communicator.rank]}.json"))
        x, idx, _ = problem(communicator.rank)
        with pytest.raises(turnout.InvalidArgument, match="mode"):
            buffer.dispatch(x, idx)

    turnout.run_virtual_ranks(2, body)
