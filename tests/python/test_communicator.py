"""Communicators: from stores, of sub-groups, and what becomes of ranks that fail."""

import pickle
import threading

import pytest
import turnout
from support import make_buffer, problem


class DictStore:
    """The least that a store must have."""

    def __init__(self):
        self.values, self.lock = {}, threading.Lock()

    def set(self, key, value):
        assert isinstance(value, bytes)
        with self.lock:
            self.values[key] = value

    def get(self, key):
        with self.lock:
            return self.values.get(key)


def in_threads(num_ranks, body):
    results, failures = [None] * num_ranks, []

    def run(rank):
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def join(store, rank, num_ranks):
    communicator = turnout.Communicator.from_store(store, rank, num_ranks, "job", transport="inproc", timeout=20)
    assert (communicator.rank, communicator.num_ranks, communicator.transport) == (rank, num_ranks, "inproc")
    got = make_buffer(communicator).dispatch(*problem(rank))
    return communicator.all_gather(b"rank %d" % rank), int(got.num_rows[0])


def test_from_any_store():
    store = DictStore()
    for said, _ in in_threads(3, lambda rank: join(store, rank, 3)):
        assert said == [b"rank 0", b"rank 1", b"rank 2"]


def test_from_stores_of_torch():
    torch = pytest.importorskip("torch")
    store = torch.distributed.PrefixStore("turnout", torch.distributed.HashStore())
    for said, _ in in_threads(3, lambda rank: join(store, rank, 3)):
        assert said == [b"rank 0", b"rank 1", b"rank 2"]


def test_stores_that_fail():
    with pytest.raises(turnout.InvalidArgument, match=r"store is .*\(int\).*set\(key, bytes\)"):
        turnout.Communicator.from_store(3, 0, 2)

    class Broken(DictStore):
        def set(self, key, value):
            raise OSError("the disk is full")

    with pytest.raises(turnout.TransportError, match=r"the store's set\('.*'\) raised: the disk is full"):
        turnout.Communicator.from_store(Broken(), 0, 2, timeout=5)
    with pytest.raises(turnout.PeerTimeout, match="1") as caught:
        turnout.Communicator.from_store(DictStore(), 0, 2, timeout=0.2)
    assert isinstance(caught.value, TimeoutError) and caught.value.record.peers == (1,) and caught.value.record.call == "bootstrap"


def test_groups_of_some_ranks():
    def body(communicator):
        members = [0, 2] if communicator.rank != 1 else [1]
        with communicator.sub_group(members, name="ep") as group:
            assert group.num_ranks == len(members) and group.rank == members.index(communicator.rank)
            x, idx, weights = problem(communicator.rank)
            buffer = make_buffer(group)
            got = buffer.dispatch(x, idx, weights)
            assert (buffer.combine(got.x, got.handle).x == x * (idx >= 0).any(1, keepdims=True)).size == x.size
        communicator.barrier()
        return group.__repr__()

    assert turnout.run_virtual_ranks(3, body) == ["<turnout.Communicator, closed>"] * 3


def test_wrong_groups():
    def body(communicator):
        with pytest.raises(turnout.InvalidArgument):
            communicator.sub_group([1 - communicator.rank])  # without this rank
        with pytest.raises(turnout.InvalidArgument, match="members is 3"):
            communicator.sub_group(3)
        with pytest.raises(turnout.InvalidArgument, match="data is 'text'"):
            communicator.all_gather("text")

    turnout.run_virtual_ranks(2, body)


def test_a_rank_that_fails_is_named():
    seen = {}

    def body(communicator):
        buffer = make_buffer(communicator)
        x, idx, weights = problem(communicator.rank)
        buffer.dispatch(x, idx, weights)
        if communicator.rank == 2:
            raise KeyError("mine")
        try:
            buffer.dispatch(x, idx, weights)
        except turnout.PeerFailed as error:
            seen[communicator.rank] = error
            raise

    with pytest.raises(KeyError, match="mine"):  # the cause, not what it did to the others
        turnout.run_virtual_ranks(3, body)
    assert sorted(seen) == [0, 1]
    for error in seen.values():
        assert isinstance(error, RuntimeError) and error.record.call == "dispatch" and 2 in error.record.peers
        copy = pickle.loads(pickle.dumps(error))
        assert copy.record == error.record and str(copy) == str(error) and type(copy) is turnout.PeerFailed


def test_a_late_rank_times_out_and_recovers():
    def body(communicator):
        buffer = make_buffer(communicator, timeout=0.2, busy_timeout=0.2)
        x, idx, weights = problem(communicator.rank)
        if communicator.rank == 0:
            with pytest.raises(turnout.PeerTimeout) as caught:
                buffer.dispatch(x, idx, weights)
            assert caught.value.record.peers == (1,) and caught.value.record.epoch == 1
        communicator.barrier()
        with pytest.raises((turnout.PeerTimeout, turnout.PeerFailed)):
            buffer.check()
        buffer.recover()
        got = buffer.dispatch(x, idx, weights, layout="expert_major")
        buffer.combine(got.x, got.handle)

    turnout.run_virtual_ranks(2, body)


def test_what_bodies_return():
    assert turnout.run_virtual_ranks(4, lambda communicator: communicator.rank**2, scheduler_seed=3) == [0, 1, 4, 9]
    with pytest.raises(turnout.InvalidArgument, match="num_ranks is 0"):
        turnout.run_virtual_ranks(0, print)
    with pytest.raises(turnout.InvalidArgument, match="body is 3"):
        turnout.run_virtual_ranks(2, 3)
