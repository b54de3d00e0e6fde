"""all_reduce of PyTorch's symmetric memory without multicast, in a CUDA graph of 20 calls: time of one in microseconds.

    torchrun --nproc-per-node 2 torch_symmetric.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

CALLS, LAUNCHES, ROUNDS = 20, 20, 4
SIZES = [8 << 2 * n for n in range(10)]


def graph_of(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def measure(call):
    graph = graph_of(call)
    best = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LAUNCHES):
            graph.replay()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / LAUNCHES / CALLS * 1e6)
    return best


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD.group_name
    first = dist.get_rank() == 0
    if first:
        print(f"PyTorch {torch.__version__}, {dist.get_world_size()} ranks")
        print(f"{'bytes':>10} {'one-shot':>9} {'two-shot':>9}", flush=True)
    for size in SIZES:
        data = symmetric.empty(max(size // 4, 4), dtype=torch.float32, device=device)
        symmetric.rendezvous(data, dist.group.WORLD)
        data.fill_(1)
        result = torch.empty_like(data)
        one = measure(lambda: torch.ops.symm_mem.one_shot_all_reduce_out(data, "sum", group, result))
        two = measure(lambda: torch.ops.symm_mem.two_shot_all_reduce_(data, "sum", group))
        if first:
            print(f"{size:10} {one:9.2f} {two:9.2f}", flush=True)
    dist.destroy_process_group()


main()
