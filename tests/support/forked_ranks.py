"""Fork the ranks of a process group from one process that has imported torch."""

import os

import torch.distributed as dist


def run(main, folder, size):
    """Call ``main`` with the folder in a process for each rank of a gloo group, and wait for all of them.

    Returns:
        whether a rank failed.
    """
    for rank in range(size):
        if os.fork() == 0:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
            main(folder)
            os._exit(0)  # without waiting for threads of gloo
    statuses = [os.wait()[1] for _ in range(size)]
    return any(statuses)
