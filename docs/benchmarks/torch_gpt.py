"""The step of a GPT-2 of 124 M parameters in bf16 with PyTorch, alone and with DistributedDataParallel.

    torchrun --nproc-per-node 2 torch_gpt.py [SEQUENCES OF A RANK'S BATCH]

Shapes, loss and optimiser (AdamW with moments in f32 by candle, in bf16 here) are those of phalanx-candle's example `measure gpt`. `--plain`
computes attention as candle does, by products and a softmax, and not by a fused kernel.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, HIDDEN, HEADS, LAYERS, TOKENS = 50304, 768, 12, 12, 1024
PLAIN = "--plain" in sys.argv
STEPS = 15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def attention(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        if PLAIN:
            mask = torch.full((tokens, tokens), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
            y = torch.softmax(q @ k.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5 + mask, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, HIDDEN))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Parameter(torch.zeros(TOKENS, HIDDEN))
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)

    def forward(self, words):
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.words.weight.t()
        return F.cross_entropy(logits.flatten(0, 1).float(), words.flatten())


def measure(model, batch):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    words = torch.arange(batch * TOKENS, device="cuda").view(batch, TOKENS) * 7 % VOCABULARY
    times = []
    for step in range(STEPS + 5):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad()
        model(words).backward()
        optimizer.step()
        torch.cuda.synchronize()
        if step >= 5:
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    batch = next((int(word) for word in sys.argv[1:] if word.isdigit()), 8)
    model = Gpt().cuda().bfloat16()
    count = sum(parameter.numel() for parameter in model.parameters())
    alone = measure(model, batch)
    averaged = measure(DistributedDataParallel(model, gradient_as_bucket_view=True), batch)
    alone = min(alone, measure(model, batch))
    if dist.get_rank() == 0:
        print(
            f"PyTorch {torch.__version__}, gpt of {count / 1e6:.1f} M parameters, bf16{', plain attention' if PLAIN else ''}, "
            f"{batch} x {TOKENS} tokens a rank: alone {alone:.2f} ms, averaged over {dist.get_world_size()} ranks {averaged:.2f} ms "
            f"({averaged / alone:.3f}; {averaged - alone:.2f} ms exposed)",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
