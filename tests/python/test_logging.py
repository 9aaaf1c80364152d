"""Lines of the library as records of the logger "turnout"; where logging is not set up, as lines of stderr."""

import logging
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import turnout

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("TURNOUT_", "DEEP_EP_", "NVSHMEM_"))}
MAKE = """
import logging, sys, threading, time
import numpy as np
import turnout
X, IDX = np.ones((4, 16), np.float32), np.zeros((4, 1), np.int64)
def make(communicator=None, **changes):
    config = dict(num_experts=4, hidden=16, max_tokens_per_rank=8, dtype="fp32", timeout=20.0, busy_timeout=20.0)
    return turnout.Buffer(communicator or turnout.Communicator.from_env(), **{**config, **changes})
def wait_for(rank, num_ranks, seconds, **changes):
    '''A call that waits for ranks that never come; its threads tell so every tenth of a second.'''
    class Store(dict):
        set = dict.__setitem__
    store = Store()
    def body(number):
        buffer = make(turnout.Communicator.from_store(store, number, num_ranks, transport="inproc"), report_every=0.1, busy_timeout=seconds)
        if number == rank:
            try:
                buffer.dispatch(X, IDX)
            except turnout.PeerTimeout:
                pass
        else:
            time.sleep(seconds + 1)
    threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(num_ranks)]
    for thread in threads: thread.start()
    return threads[rank]
"""


def run(program, **variables):
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", MAKE + textwrap.dedent(program)], capture_output=True, text=True, timeout=60, env=CLEAN | variables
    )
    assert done.returncode == 0 and "terminate called" not in done.stderr and "Fatal Python error" not in done.stderr, done.stdout + done.stderr
    return done


def test_without_logging_lines_go_to_stderr_as_before():
    done = run("make()", TURNOUT_NONSENSE="1", TURNOUT_LOG="info")
    assert "turnout warn: TURNOUT_NONSENSE" in done.stderr and "turnout [rank 0] info: 1 ranks over inproc" in done.stderr
    assert run("make()", TURNOUT_NONSENSE="1").stderr.count("\n") == 1
    assert run("make()", TURNOUT_NONSENSE="1", TURNOUT_LOG="error").stderr == ""


def test_with_logging_they_are_records():
    done = run(
        """
        logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s rank=%(rank)d: %(message)s", level=logging.DEBUG)
        make()
        """,
        TURNOUT_NONSENSE="1",
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("turnout WARNING rank=-1: TURNOUT_NONSENSE")
    assert lines[1] == "turnout INFO rank=0: [rank 0] 1 ranks over inproc, nodes: 1"
    assert lines[2].startswith("turnout DEBUG rank=0: [rank 0] Buffer: 4 experts, 8 tokens of 16 fp32 at most") and len(lines) == 3


@pytest.mark.parametrize("level, lines", [("WARNING", 1), ("INFO", 2), ("DEBUG", 3), ("ERROR", 0)])
def test_the_level_of_the_logger_counts(level, lines):
    program = f"""
        logging.basicConfig(stream=sys.stdout)
        logging.getLogger("turnout").setLevel("{level}")
        make()
    """
    assert run(program, TURNOUT_NONSENSE="1").stdout.count("\n") == lines


def test_a_call_that_waits_tells_so_while_it_waits():
    done = run(
        """
        seen = threading.Event()
        class Handler(logging.Handler):
            def emit(self, record):
                assert threading.current_thread() is not threading.main_thread()
                if "has waited" in record.getMessage(): seen.set()
        logging.getLogger("turnout").addHandler(Handler())
        waiting = wait_for(0, 2, 30)
        assert seen.wait(10) and waiting.is_alive()
        print("told")
        """
    )
    assert done.stdout == "told\n"


def test_a_handler_that_calls_the_library_does_not_wait_for_itself():
    done = run(
        """
        class Handler(logging.Handler):
            def emit(self, record):
                if record.levelname == "INFO":
                    make(known.pop()).dispatch(X, IDX)  # logs, too
                print(record.levelname, flush=True)
                told.release()
        told, known = threading.Semaphore(0), [turnout.Communicator.from_env()]
        logger = logging.getLogger("turnout")
        logger.addHandler(Handler())
        logger.setLevel("DEBUG")
        turnout.Communicator.from_env()
        for _ in range(2):
            assert told.acquire(timeout=20)
        """
    )
    assert done.stdout == "INFO\nDEBUG\n"


def test_a_handler_that_raises_does_no_harm():
    done = run(
        """
        class Handler(logging.Handler):
            def emit(self, record): raise RuntimeError("broken handler")
        logging.getLogger("turnout").addHandler(Handler())
        print(make().dispatch(X, IDX).x.sum())
        """,
        TURNOUT_NONSENSE="1",
    )
    assert done.stdout == "64.0\n" and "broken handler" in done.stderr


@pytest.mark.parametrize("first", ["import logging", "pass"])  # logging closes its handlers when the interpreter ends
def test_what_is_told_just_before_the_end_is_not_lost(tmp_path, first):
    path = tmp_path / "log.txt"
    program = f"""
        {first}
        import logging
        logging.getLogger("turnout").addHandler(logging.FileHandler({str(path)!r}, mode="w"))
        turnout.Communicator.from_env()
    """
    for _ in range(5):
        run(program, TURNOUT_NONSENSE="1")
        assert "TURNOUT_NONSENSE" in path.read_text()


def test_an_interpreter_that_ends_while_threads_log():
    for _ in range(3):
        run(
            """
            logging.basicConfig(stream=sys.stdout)
            waiting = [wait_for(0, 2, 30, report_every=0.001) for _ in range(4)]
            time.sleep(0.3)
            """
        )


def test_threads_that_hold_the_interpreter_and_threads_that_do_not():
    """Calls from many threads at once, while lines are made with and without the interpreter's lock."""
    logger, records = logging.getLogger("turnout"), []

    class Handler(logging.Handler):
        def emit(self, record):
            records.append(record.getMessage())

    handler = Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        def body(communicator):
            for _ in range(5):
                buffer = turnout.Buffer(communicator, num_experts=4, hidden=8, max_tokens_per_rank=4, dtype="fp32", timeout=20.0, busy_timeout=20.0)
                buffer.dispatch(np.ones((2, 8), np.float32), np.zeros((2, 1), np.int64))

        threads = [threading.Thread(target=turnout.run_virtual_ranks, args=(4, body)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _ in range(1000):
            if sum("Buffer" in record for record in records) == 80:
                break
            threading.Event().wait(0.01)
        assert sum("Buffer" in record for record in records) == 80
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def test_a_forked_child_logs_for_itself():
    done = run(
        """
        import os
        logging.basicConfig(stream=sys.stdout, format="%(process)d %(message)s")
        turnout.Communicator.from_env()
        time.sleep(0.2)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            logging.getLogger("turnout").setLevel("INFO")
            turnout.Communicator.from_env()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("child", child)
        """,
        TURNOUT_NONSENSE="1",
    )
    child = done.stdout.rsplit("child ", 1)[1].strip()
    assert done.stdout.count("TURNOUT_NONSENSE") == 1
    assert f"{child} [rank 0] 1 ranks over inproc" in done.stdout
