"""What communication adds to a step of training with PyTorch. phalanx-train's example `gpu_step` does the same.

    torchrun --nproc-per-node 2 torch_training.py --mode ddp [--precision bf16]
    torchrun --nproc-per-node 2 torch_training.py --mode fsdp

The network has the matrices of GPT-2 with 124 M parameters, and only the products with them: no nonlinearity, norm, bias
or residual. Each token attends to itself alone, so that the values are the output of attention. The gradient of the logits
is given. Activations are bf16.

Precision `mixed` (default): f32 weights, moments and sum of gradients, as in `gpu_step`. DDP computes under autocast, FSDP2
with a MixedPrecisionPolicy. Precision `bf16`: weights, moments and gradients are bf16.

- ddp: DistributedDataParallel, buckets of 25 MiB that are views of the gradients. Without communication: `no_sync()`.
- fsdp: `fully_shard` of each block and of the head, resharded after the forward (the head's backward is next, so it stays).
  Without communication: the network with whole bf16 weights, and the optimizer on this rank's part of the weights.

Both with the fused AdamW. Rounds with and without communication take turns. A round's steps are enqueued without a wait
between them. Exposed communication is the median of the rounds' differences. Memory is that of rank 0's GPU after the
rounds with communication: the caching allocator returns nothing.
"""

import argparse
import contextlib
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        # A copy: the queries and keys need not be kept.
        values = self.attention(x).chunk(3, dim=1)[2].contiguous()
        return self.down(self.up(self.projection(values)))


class Network(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.blocks))
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def replicated(args, network, device, data):
    """A step with communication or the same without."""
    is_mixed = args.precision == "mixed"
    network = network if is_mixed else network.bfloat16()
    devices = None if device.type == "cpu" else [device]
    ddp = DistributedDataParallel(network, device_ids=devices, bucket_cap_mb=25, gradient_as_bucket_view=True)
    optimizer = adam(ddp.parameters())

    def step(communicates):
        with contextlib.nullcontext() if communicates else ddp.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                output = ddp(data[0])
            output.backward(data[1])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def sharded(args, network, device, data):
    """A step with communication or the same without."""
    whole, ranks, rank = None, dist.get_world_size(), dist.get_rank()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.precision == "bf16":
        network, policy = network.bfloat16(), MixedPrecisionPolicy()
    for block in network.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=True)
    fully_shard(network.head, mp_policy=policy, reshard_after_forward=False)
    fully_shard(network, mp_policy=policy)
    optimizer = adam(network.parameters())

    def make_whole():
        """The network with all its weights, and an optimizer of this rank's parts, with gradients that do not change."""
        with torch.device(device):
            copy = Network(args).bfloat16()
        parts = [nn.Parameter(part.to_local().detach().clone()) for part in network.parameters()]
        for part in parts:
            part.grad = torch.full_like(part, 1e-3)
        return copy, adam(parts)

    def step(communicates):
        nonlocal whole
        if communicates:
            network(data[0]).backward(data[1])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return
        whole = whole or make_whole()
        copy, of_parts = whole
        copy(data[0]).backward(data[1])
        copy.zero_grad(set_to_none=True)
        of_parts.step()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--precision", choices=["mixed", "bf16"], default="mixed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to see that it runs")
    for name, value in [("width", 768), ("blocks", 12), ("vocabulary", 50304), ("rows", 8192), ("rounds", 15), ("steps", 10)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()

    on_gpu = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(0)
    with torch.device(device):
        network = Network(args)
        torch.manual_seed(1 + dist.get_rank())
        x = torch.rand(args.rows, args.width).mul_(2).sub_(1).bfloat16()
        gradient = torch.rand(args.rows, args.vocabulary, dtype=torch.bfloat16).mul_(2 / args.rows).sub_(1 / args.rows)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    make = replicated if args.mode == "ddp" else sharded
    step = make(args, network, device, (x, gradient))

    def round_of(communicates):
        """Milliseconds of a step."""
        synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        synchronize()
        dist.barrier()
        synchronize()
        began = time.perf_counter()
        for _ in range(args.steps):
            step(communicates)
        synchronize()
        return (time.perf_counter() - began) * 1e3 / args.steps

    for _ in range(3):
        round_of(True)
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    allocated = torch.cuda.max_memory_allocated() if on_gpu else 0
    for _ in range(2):
        round_of(False)
    rounds = [(round_of(True), round_of(False)) for _ in range(args.rounds)]
    differences = [with_all - without for with_all, without in rounds]
    if dist.get_rank() == 0:
        first, median, third = statistics.quantiles(differences, n=4, method="inclusive")
        print(
            f"torch {torch.__version__} {args.mode} {args.precision}, {dist.get_world_size()} ranks, "
            f"{parameters / 1e6:.1f} M parameters: step {statistics.median(w for w, _ in rounds):.3f} ms, without communication "
            f"{statistics.median(w for _, w in rounds):.3f} ms, exposed {median:.3f} ms (quartiles {first:.3f} to {third:.3f}), "
            f"GPU memory {(total - free) >> 20} MiB, of it allocated at most {allocated >> 20} MiB",
            flush=True,
        )
    dist.destroy_process_group()


main()
