"""`import deep_ep` by way of `turnout deep-ep enable`, and the calls of frameworks over two processes."""

import base64
import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
from turnout.__main__ import main  # noqa: E402

HERE = pathlib.Path(__file__).parent
SERVING = ["vllm_high_throughput", "vllm_low_latency", "vllm_v2", "sglang", "sglang_v2", "lmdeploy", "lightllm", "tensorrt_llm", "rtp_llm", "reinforcement_learning"]
TRAINING = ["megatron", "automodel", "megatron_hybrid", "torchtitan"]


def environment(target):
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}


def python(target, program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment(target), cwd=target)


@pytest.mark.parametrize("calls", [SERVING, TRAINING], ids=["serving", "training"])
def test_calls_of_frameworks(calls, tmp_path):
    shim = tmp_path / "site"
    assert main(["deep-ep", "enable", "--target", str(shim)]) == 0
    command = [sys.executable, "-m", "turnout", "launch", "-n", "2", "--timeout", "250", "--", sys.executable, str(HERE / "deepep_ranks.py"), str(tmp_path), *calls]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(shim))
    assert done.returncode == 0, done.stdout + done.stderr
    for call in calls:
        assert done.stdout.count(f"{call} ok\n") == 2, call


def test_enable_and_disable(tmp_path, capsys):
    assert main(["deep-ep", "status", "--target", str(tmp_path)]) == 0
    assert "there is no deep_ep" in capsys.readouterr().out
    for _ in range(2):  # again does no harm
        assert main(["deep-ep", "enable", "--target", str(tmp_path)]) == 0
    (info,) = tmp_path.glob("*.dist-info")
    # A distribution of its own, whose RECORD is right.
    found = importlib.metadata.Distribution.at(info)
    assert found.metadata["Name"] == "turnout-deep-ep" and found.requires == ["turnout"]
    for file in found.files:
        if file.hash is not None:
            digest = base64.urlsafe_b64encode(hashlib.sha256((tmp_path / file).read_bytes()).digest()).rstrip(b"=").decode()
            assert (file.hash.mode, file.hash.value, file.size) == ("sha256", digest, (tmp_path / file).stat().st_size)
    assert {str(file) for file in found.files} == {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["deep-ep", "status", "--target", str(tmp_path)]) == 0
    assert "deep_ep is Turnout" in capsys.readouterr().out
    done = python(
        tmp_path,
        "import sys, deep_ep, turnout.deep_ep, importlib.util\n"
        "from deep_ep.utils import EventHandle, EventOverlap\n"
        "from deep_ep.hybrid_ep_buffer import indices_to_map\n"
        "import deep_ep.utils\n"
        "assert importlib.util.find_spec('deep_ep') is not None\n"
        "for name in ('Buffer', 'Config', 'ElasticBuffer', 'EPHandle', 'EventHandle', 'EventOverlap', 'HybridEPBuffer', 'topk_idx_t',\n"
        "             'get_physical_domain_size', 'get_logical_domain_size'):\n"
        "    assert getattr(deep_ep, name) is getattr(turnout.deep_ep, name), name\n"
        "assert deep_ep.utils.EventOverlap is EventOverlap is deep_ep.EventOverlap and isinstance(deep_ep.Config, type)\n"
        "import torch\n"
        "assert deep_ep.topk_idx_t is torch.int64 and deep_ep.__version__.startswith('2.1.0') and not torch.cuda.is_initialized()\n",
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "deep_ep" / "__pycache__").mkdir(exist_ok=True)
    assert main(["deep-ep", "disable", "--target", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "removed" in capsys.readouterr().out
    assert main(["deep-ep", "disable", "--target", str(tmp_path)]) == 1
    assert "nothing to remove" in capsys.readouterr().err


def test_a_real_one_is_left_alone(tmp_path, capsys):
    real = tmp_path / "deep_ep"
    real.mkdir()
    (real / "__init__.py").write_text("Buffer = 'the real one'\n")
    before = sorted(tmp_path.rglob("*"))
    for command in ("enable", "disable"):
        assert main(["deep-ep", command, "--target", str(tmp_path)]) == 1
        said = capsys.readouterr().err
        assert "not Turnout's" in said and str(real) in said
    assert main(["deep-ep", "status", "--target", str(tmp_path)]) == 0
    assert "another package" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before and (real / "__init__.py").read_text() == "Buffer = 'the real one'\n"


@pytest.mark.parametrize("words, status", [([], 2), (["--help"], 0), (["enabel"], 2), (["enable", "--target"], 2)])
def test_words_of_the_command(words, status, capsys):
    assert main(["deep-ep", *words]) == status
    said = capsys.readouterr()
    assert "usage: python -m turnout deep-ep enable|disable" in said.out + said.err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["deep-ep", "enable", "--target", str(tmp_path / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err
