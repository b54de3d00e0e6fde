"""What an operation costs with torch.distributed and NCCL: CPU time of a call, and time of a call, as rank 0 sees them.

    torchrun --nproc-per-node 2 torch_nccl.py all_reduce [all_gather reduce_scatter all_to_all]
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

CALLS, ROUNDS = 50, 15
SIZES = (8, 512, 32768, 2 << 20, 32 << 20)


def calls(ranks):
    """By name; `whole` has a block for each rank, and so has `result`; `part` is one."""
    return {
        "all_reduce": lambda whole, part, result: dist.all_reduce(whole),
        "all_gather": lambda whole, part, result: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda whole, part, result: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda whole, part, result: dist.all_to_all_single(result, whole),
    }


def measure(call, size, ranks):
    whole = torch.zeros(max(size // 4, ranks), device="cuda")
    result = torch.empty_like(whole)
    part = torch.zeros(whole.numel() // ranks, device="cuda")
    enqueue, total = [], []
    for _ in range(ROUNDS + 3):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call(whole, part, result)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        enqueue.append((enqueued - began) / CALLS * 1e6)
        total.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(enqueue[3:]), statistics.median(total[3:])


def main():
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    if is_first:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        print(f"PyTorch {torch.__version__}, NCCL {version}, {ranks} ranks", flush=True)
        print(f"{'operation':>15} {'bytes':>10} {'enqueue us':>11} {'time us':>9}", flush=True)
    for operation in sys.argv[1:] or ["all_reduce"]:
        for size in SIZES:
            enqueue, total = measure(calls(ranks)[operation], size, ranks)
            if is_first:
                print(f"{operation:>15} {size:10} {enqueue:11.2f} {total:9.2f}", flush=True)
    dist.destroy_process_group()


main()
