"""deep_ep on GPUs: the cases of deepep_cuda_cases, ranks as threads of one GPU and as processes. Skipped without a GPU."""

import os
import pathlib
import subprocess
import sys

import pytest

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # virtual ranks of one GPU need a queue each
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
from deepep_cases import on_ranks  # noqa: E402
from deepep_cuda_cases import CASES, chosen  # noqa: E402

HERE = pathlib.Path(__file__).parent


def keep_memory():
    """Torch keeps memory by streams, and takes more by cudaMalloc, which may wait for all kernels that run, and those of a rank wait for the other."""
    held = [torch.empty(1 << 28, dtype=torch.uint8, device="cuda"), *(torch.empty(1 << 19, dtype=torch.uint8, device="cuda") for _ in range(64))]
    del held


# One rank first: the first launch of a kernel of torch loads it, which waits for all kernels that run, and those of a rank wait for the other.
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", [name for name, _, _ in CASES])
def test_on_one_gpu(num_ranks, name):
    if num_ranks > 1 and name.startswith("graphs"):
        pytest.skip("graphs of several ranks need a process each: torch captures one at a time")
    body, how = next((body, how) for case, body, how in CASES if case == name)

    def run(group):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            keep_memory()
            group.barrier()  # nobody takes memory any more when kernels begin to wait
            body(group, group.rank, num_ranks, **how)
            stream.synchronize()

    on_ranks(num_ranks, run)


GROUPS = ("many_tokens", "few_tokens", "masked_ranks", "elastic", "hybrid", "graphs")


@pytest.mark.parametrize("group", GROUPS)
def test_in_two_processes(tmp_path, group):
    """The cases in two processes, over a ProcessGroup, with a GPU each, or with slices of time of one. There every exchange takes
    milliseconds, so the first and the last case of a group have to do."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "deepep_cuda_ranks.py"), str(tmp_path), group],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    wanted = chosen([group], torch.cuda.device_count() < 2)
    for rank, text in zip(ranks, said):
        assert rank.returncode == 0, "\n".join(said)
        assert [line.split()[0] for line in text.splitlines() if line.endswith(" ok")] == [name for name, _, _ in wanted]
