"""What an all_reduce costs with torch.distributed and NCCL: CPU time of a call, and time of a call, as rank 0 sees them.

    torchrun --nproc-per-node 2 torch_all_reduce.py
"""

import os
import statistics
import time

import torch
import torch.distributed as dist

CALLS, ROUNDS = 50, 15

dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if dist.get_rank() == 0:
    print(f"PyTorch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, {dist.get_world_size()} ranks")
    print(f"{'bytes':>10} {'enqueue us':>11} {'time us':>9}")
for size in (8, 512, 32768, 2 << 20, 32 << 20):
    tensor = torch.zeros(size // 4, device="cuda")
    enqueue, total = [], []
    for _ in range(ROUNDS + 3):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            dist.all_reduce(tensor)
        enqueued = time.perf_counter()
        torch.cuda.synchronize()
        enqueue.append((enqueued - began) / CALLS * 1e6)
        total.append((time.perf_counter() - began) / CALLS * 1e6)
    if dist.get_rank() == 0:
        print(f"{size:10} {statistics.median(enqueue[3:]):11.2f} {statistics.median(total[3:]):9.2f}")
dist.destroy_process_group()
