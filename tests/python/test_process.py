"""Processes: what importing costs, how an interpreter ends, forks, and the command."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

HEADER = """
import sys
import numpy as np
import turnout
X, IDX = np.ones((4, 16), np.float32), np.zeros((4, 1), np.int64)
def make(communicator=None, **changes):
    config = dict(num_experts=4, hidden=16, max_tokens_per_rank=8, dtype="fp32", timeout=20.0, busy_timeout=20.0)
    return turnout.Buffer(communicator or turnout.Communicator.from_env(), **{**config, **changes})
"""


def run(program, *command, header=HEADER, status=0, timeout=120):
    """Runs a program; its output."""
    done = subprocess.run(
        [*command, sys.executable, "-X", "faulthandler", "-c", header + textwrap.dedent(program)], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "terminate called" not in done.stderr and "Fatal Python error" not in done.stderr, done.stderr
    return done.stdout


def test_importing_is_cheap_and_changes_nothing():
    program = """
        import json, os, sys, time
        before = dict(os.environ)
        import numpy
        modules = set(sys.modules)
        start = time.perf_counter()
        import turnout
        took = time.perf_counter() - start
        new = {name.split(".")[0] for name in set(sys.modules) - modules}
        print(json.dumps(dict(took=took, same=dict(os.environ) == before, new=sorted(new), threads=len(os.listdir("/proc/self/task")))))
    """
    results = [json.loads(run(program, header="")) for _ in range(3)]
    assert all(result["same"] for result in results)
    assert not {"torch", "jax", "cupy", "ml_dtypes"} & set(results[0]["new"])
    assert min(result["took"] for result in results) < 0.060


def test_importing_needs_no_numpy():
    run("import sys, turnout; turnout.run_virtual_ranks(2, lambda c: c.barrier()); assert 'numpy' not in sys.modules", header="")


@pytest.mark.parametrize(
    "program",
    [
        "b = make(); r = b.dispatch(X, IDX); x = r.x",
        "b = make(); r = b.dispatch(X, IDX); del b; sys.keep = r.x",
        "c = turnout.Communicator.from_env(); b = make(c); p = b.dispatch_async(X, IDX); h = b.dispatch(X, IDX).handle; sys.keep = [p, h, c, b]",
        "b = make(); r = b.dispatch(X, IDX); cycle = [b, r]; cycle.append(cycle); del b, r, cycle",
        "import atexit; b = make(); atexit.register(lambda: print(b.dispatch(X, IDX).x.sum()))",
        "sys.keep = turnout.run_virtual_ranks(3, lambda c: make(c).dispatch(X, IDX))",
        "b = make(); sys.exit(0)",
        "import os; b = make(); r = b.dispatch_async(X, IDX, receive='resident'); os._exit(0)",
    ],
)
def test_interpreters_end_in_any_order(program):
    run(program)


def test_threads_that_wait_at_the_end():
    run("""
        import threading, time
        store, started = {}, threading.Semaphore(0)
        class Store:
            def set(self, key, value): store[key] = value
            def get(self, key): return store.get(key)
        def rank(number):
            communicator = turnout.Communicator.from_store(Store(), number, 2, transport="inproc")
            buffer = make(communicator)
            started.release()
            if number == 0:
                try:
                    buffer.dispatch(X, IDX)  # rank 1 never comes
                except turnout.Error:
                    time.sleep(100)
            else:
                time.sleep(100)
        for number in range(2):
            threading.Thread(target=rank, args=(number,), daemon=True).start()
        for _ in range(2):
            started.acquire()
        time.sleep(0.1)
    """)


def test_a_forked_child_is_told():
    out = run("""
        import os
        communicator = turnout.Communicator.from_env()
        buffer = make(communicator)
        result = buffer.dispatch(X, IDX)
        handle = result.handle
        for call in (lambda: buffer.dispatch(X, IDX), lambda: communicator.barrier(), lambda: result.x, lambda: make(communicator)):
            child = os.fork()
            if child == 0:
                try:
                    call()
                except turnout.InvalidArgument as error:
                    assert "forked" in str(error) and "spawn" in str(error), error
                    del buffer, result, communicator, handle
                    sys.exit(7)
                sys.exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        child = os.fork()
        if child == 0:  # a child has Buffers of its own
            make().dispatch(X, IDX)
            sys.exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
        print(buffer.dispatch(X, IDX).x.sum())  # and the parent goes on
    """)
    assert out == "64.0\n"


def test_ranks_are_processes():
    out = run(
        """
        communicator = turnout.Communicator.from_env()
        buffer = make(communicator)
        got = buffer.dispatch(X * communicator.rank, IDX + communicator.rank, layout="expert_major")
        back = buffer.combine(got.x, got.handle)
        assert (back.x == X * communicator.rank).all()
        if communicator.rank == 0: print(communicator.transport, communicator.num_ranks)
        """,
        sys.executable, "-m", "turnout", "launch", "-n", "3", "--",
    )  # fmt: skip
    assert out == "shm 3\n"


def test_a_process_that_dies_is_found():
    out = run(
        """
        import os
        communicator = turnout.Communicator.from_env()
        buffer = make(communicator)
        buffer.dispatch(X, IDX)
        if communicator.rank == 1: os._exit(0)
        try:
            buffer.dispatch(X, IDX)
        except turnout.PeerFailed as error:
            print(error.record.peers, error.record.call)
        """,
        sys.executable, "-m", "turnout", "launch", "-n", "2", "--",
    )  # fmt: skip
    assert out == "(1,) dispatch\n"


def turnout_command(*arguments):
    return subprocess.run([sys.executable, "-m", "turnout", *arguments], capture_output=True, text=True, timeout=120)


def test_the_command():
    assert turnout_command("--version").stdout.startswith("turnout ")
    done = turnout_command("selftest", "-n", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    done = turnout_command("demo", "-n", "2", "--placement", "threads", "--corrupt")
    assert done.returncode == 1
    done = turnout_command("bench", "-n", "0")
    assert done.returncode == 2 and "--ranks" in done.stderr
    assert turnout_command("launch", "-n", "2", "--", "false").returncode == 1
    script = shutil.which("turnout", path=os.path.dirname(sys.executable))
    assert script is None or subprocess.run([script, "version"], capture_output=True).returncode == 0
