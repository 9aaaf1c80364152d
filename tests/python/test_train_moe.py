"""examples/train_moe.py: the same losses on any number of ranks, bit for bit."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
PROGRAM = pathlib.Path(__file__).parents[2] / "examples/train_moe.py"
STEPS, EXPERTS, TOP_K = 5, 8, 2


def train(folder, num_ranks, *options, launcher=None):
    launcher = launcher or ["-m", "turnout", "launch", "-n", str(num_ranks), "--timeout", "200", "--", sys.executable]
    files = ["--losses", str(folder / "losses"), "--routing", str(folder / "routing.npy")]
    command = [sys.executable, *launcher, str(PROGRAM), "--steps", str(STEPS), *files, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return [float.fromhex(line) for line in (folder / "losses").read_text().split()], np.load(folder / "routing.npy"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), 1, "--plot", "")


def test_it_learns_and_says_so(alone):
    losses, routing, output = alone
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.8
    assert f"step {STEPS}/{STEPS}, loss {losses[-1]:.4f}" in output
    assert routing.shape == (STEPS * 512, TOP_K) and routing.min() >= 0 and routing.max() < EXPERTS


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_losses_are_the_same_on_any_number_of_ranks(num_ranks, alone, tmp_path):
    losses, routing, _ = train(tmp_path, num_ranks, "--plot", "")
    assert losses == alone[0]
    np.testing.assert_array_equal(routing, alone[1])


def test_another_wire_is_close(alone, tmp_path):
    losses, _, _ = train(tmp_path, 2, "--plot", "", "--wire", "payload")
    np.testing.assert_allclose(losses, alone[0], rtol=1e-3)


def test_torchrun_and_the_bench_of_its_routing(alone, tmp_path):
    losses, _, output = train(
        tmp_path, 2, "--plot", str(tmp_path / "plot.png"), launcher=["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    )
    assert losses == alone[0]
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "no plot: matplotlib is not here" in output
    else:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    words = output[output.index("next: turnout ") + len("next: turnout ") :].split("\n")[0].split()
    bench = subprocess.run([sys.executable, "-m", "turnout", *words, "--ranks", "2", "--tokens", "64", "--iters", "3"], capture_output=True, text=True)
    assert bench.returncode == 0 and "verified" in bench.stdout, bench.stdout + bench.stderr


def test_what_cannot_be(tmp_path):
    def fails(*options, ranks=None):
        launcher = ["-m", "turnout", "launch", "-n", str(ranks), "--", sys.executable] if ranks else []
        done = subprocess.run([sys.executable, *launcher, str(PROGRAM), *options], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode != 0
        return done.stderr

    assert "3 ranks cannot share 8 sequences evenly: use 1, 2, 4 or 8" in fails(ranks=3)
    assert "there is no file no-such-file" in fails("--text", "no-such-file")
    (tmp_path / "short").write_text("short")
    assert "has 5 characters, but a sequence takes 65" in fails("--text", "short")
