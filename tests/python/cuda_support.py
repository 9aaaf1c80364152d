"""What tests on a GPU share. Importing it skips a file where there is none."""

import os

import pytest
import turnout

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # virtual ranks of one GPU need a queue each
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
tt = pytest.importorskip("turnout.torch")

EXPERTS, HIDDEN, TOPK = 8, 256, 2


@pytest.fixture(autouse=True)
def first_gpu():
    """Each test begins on the first GPU: libraries that start on all of them may leave another one the current one."""
    torch.cuda.set_device(0)
    yield
    torch.cuda.synchronize()


def make(communicator=None, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=128, dtype=torch.float32, max_topk=TOPK, device="cuda:0", timeout=20.0)
    return tt.Buffer(communicator or turnout.Communicator.from_env(), **{**config, **changes})


def problem(seed=0, tokens=32, dtype=torch.float32, hidden=HIDDEN):
    """Whole numbers, experts, and weights that fp32 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 8, (tokens, hidden), generator=generator).to(dtype)
    idx = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    weights = torch.randint(1, 64, (tokens, TOPK), generator=generator) / 64
    return x.to("cuda:0"), idx.to("cuda:0"), weights.to("cuda:0")
