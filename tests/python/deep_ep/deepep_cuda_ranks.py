"""A rank of test_deepep_cuda: a process with a GPU of its own, if there are enough. Arguments: a folder for the store, and how names of cases begin (none: all)."""

import os
import sys
import traceback

import torch
import torch.distributed as dist
from deepep_cuda_cases import chosen


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % num_gpus)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=size)
    for name, body, how in chosen(sys.argv[2:], num_gpus < size):
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                body(dist.group.WORLD, rank, size, **how)
                stream.synchronize()
        except Exception:
            sys.stdout.write(f"{name} FAILED\n{traceback.format_exc()}\n")
            sys.stdout.flush()
            os._exit(1)  # a peer may wait for this rank: it hears that it is gone
        sys.stdout.write(f"{name} ok\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
