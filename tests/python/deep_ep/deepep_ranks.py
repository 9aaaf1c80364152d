"""A rank of test_deepep_frameworks: `import deep_ep`, over a ProcessGroup, called as frameworks call it, and every result against the model.

Arguments: a folder for the store, and names of calls (none: all).
"""

import sys

import deepep_serving
import deepep_training
import torch
import torch.distributed as dist
from deepep_answers import RANK, SIZE


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=RANK, world_size=SIZE)
    for call in deepep_serving.CALLS + deepep_training.CALLS:
        if not sys.argv[2:] or call.__name__ in sys.argv[2:]:
            call(dist.group.WORLD)
            sys.stdout.write(f"{call.__name__} ok\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
