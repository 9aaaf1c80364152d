"""python -m turnout selftest: alone, under torchrun on one machine and on two that are one, and where it must fail."""

import json
import os
import socket
import subprocess
import sys

import pytest

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("TURNOUT_")}


def free_port():
    """With a free one behind it, which is Turnout's."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            try:
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            except (OSError, OverflowError):
                continue
            return first.getsockname()[1]


def torchrun(*words):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN | {"OMP_NUM_THREADS": "1"})


def answer(process):
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def test_alone(tmp_path):
    path = tmp_path / "selftest.json"
    command = [sys.executable, "-m", "turnout", "selftest", "--device", "cpu", "--seconds", "0.02", "-n", "2", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 2 ranks (shm): 194 passed, 0 failed" in done.stdout and "x limit" in done.stdout
    assert "selftest: low_latency, expert_slab: 190 of 190 cases done" in done.stderr
    report = json.loads(path.read_text())
    assert report["tests"]["failed"] == 0 and len(report["tests"]["names"]) == 194
    assert all(case["p50_us"] > 0 and case["limit_us"] > 0 and case["verified"] for case in report["cases"]) and len(report["cases"]) == 4


def test_under_torchrun(tmp_path):
    path = tmp_path / "selftest.json"
    port = free_port()
    words = ["--nproc_per_node", "3", "--master_addr", "127.0.0.1", "--master_port", str(port), "-m", "turnout", "selftest", "--device", "cpu"]
    status, out, err = answer(torchrun(*words, "--seconds", "0", "--json", str(path)))
    assert status == 0, out + err
    assert out.count("PASS: 3 ranks (shm): 190 passed, 0 failed") == 1
    assert json.loads(path.read_text())["tests"]["passed"] == 190
    status, out, err = answer(torchrun(*words, "--corrupt"))
    assert status != 0 and "FAIL: 3 ranks (shm): 189 passed, 1 failed" in out, out + err
    status, out, err = answer(torchrun(*words, "--ranks", "2"))
    assert status != 0 and "--ranks 2: this is one of the 3 ranks that torchrun has started" in err, out + err


def test_under_torchrun_of_two_nodes():
    port = free_port()
    nodes = [
        torchrun(
            "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port", str(port),
            "-m", "turnout", "selftest", "--device", "cpu", "--seconds", "0.02",
        )
        for node in range(2)
    ]  # fmt: skip
    answers = [answer(node) for node in nodes]
    assert all(status == 0 for status, _, _ in answers), answers
    assert "PASS: 2 ranks (shm): 194 passed, 0 failed" in answers[0][1] and "PASS" not in answers[1][1]


def test_a_rank_that_does_not_come_and_a_world_that_is_wrong():
    there = CLEAN | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "turnout", "selftest"]
    alone = subprocess.run(command, capture_output=True, text=True, env=there | {"TURNOUT_BOOTSTRAP_TIMEOUT_MS": "500"})
    assert alone.returncode == 3 and "missing ranks [1]" in alone.stderr
    beyond = subprocess.run(command, capture_output=True, text=True, env=there | {"RANK": "2"})
    assert beyond.returncode == 2 and "rank 2 of 2 ranks" in beyond.stderr
    nameless = subprocess.run(command, capture_output=True, text=True, env={k: v for k, v in there.items() if k != "WORLD_SIZE"})
    assert nameless.returncode == 2 and "WORLD_SIZE" in nameless.stderr
