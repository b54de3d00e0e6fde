"""all_reduce of host memory with torch.distributed and Gloo, as mpibench.c measures it, and with its lines.

    torchrun --nproc-per-node 2 torch_gloo.py allreduce 16777216 4
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

operation, largest, smallest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if operation != "allreduce":
    sys.exit()
rank = int(os.environ["LOCAL_RANK"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
size = smallest
while size <= largest:
    tensor = torch.ones(size // 4)
    iterations = 300 if size <= 65536 else 100 if size <= 1 << 20 else 20
    times = []
    for iteration in range(iterations + iterations // 5):
        tensor.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    # An iteration's time is its slowest rank's.
    slowest = torch.tensor(times[iterations // 5 :], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"gloo,1,allreduce,{dist.get_world_size()},{size},{statistics.median(slowest.tolist()) * 1e6:.3f}", flush=True)
    size *= 4
dist.destroy_process_group()
