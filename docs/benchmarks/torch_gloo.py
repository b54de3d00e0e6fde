"""Collectives of host memory with torch.distributed and Gloo, as mpibench.c measures them, and with its lines.

    torchrun --nproc-per-node 2 torch_gloo.py allreduce 16777216 4 [FACTOR]

The bytes are those of a rank's larger buffer.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

operation, largest, smallest = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
factor = int(sys.argv[4]) if len(sys.argv) > 4 else 4
torch.set_num_threads(1)
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# A store of its own: torchrun's wants libuv, without which Debian builds PyTorch.
port = int(os.environ["MASTER_PORT"]) + 1
store = dist.TCPStore(os.environ["MASTER_ADDR"], port, ranks, rank == 0, use_libuv=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def call(size):
    """What is measured, and the buffer that it may change."""
    whole = torch.ones(max(size // 4 // ranks, 1) * ranks if operation in ("allgather", "alltoall") else size // 4)
    other = torch.ones(whole.numel())
    calls = {
        "allreduce": lambda: dist.all_reduce(whole),
        "bcast": lambda: dist.broadcast(whole, 0),
        "allgather": lambda: dist.all_gather_into_tensor(whole, other[: whole.numel() // ranks]),
        "alltoall": lambda: dist.all_to_all_single(whole, other),
    }
    return calls.get(operation), whole


if call(4)[0] is None:
    sys.exit()
size = smallest
while size <= largest:
    run, tensor = call(size)
    iterations = 300 if size <= 65536 else 100 if size <= 1 << 20 else 20
    times = []
    for iteration in range(iterations + iterations // 5):
        tensor.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    # An iteration's time is its slowest rank's.
    slowest = torch.tensor(times[iterations // 5 :], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        median = statistics.median(slowest.tolist()) * 1e6
        print(f"gloo,1,{operation},{ranks},{size},{median:.3f}", flush=True)
    size *= factor
dist.destroy_process_group()
