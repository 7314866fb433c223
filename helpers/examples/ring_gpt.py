"""Train a small GPT on sequences cut over all ranks: torchrun --nproc-per-node 2 -m helpers.examples.ring_gpt"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, gelu

from helpers.device import ON_GPU
from helpers.torch_ring import local_positions, ring_attention


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.heads, self.blocks = heads, nn.ModuleList()
        for _ in range(layers):
            sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, width), "down": (width, width)}
            linear = {name: nn.Linear(*size) for name, size in sizes.items()}
            self.blocks.append(nn.ModuleDict({"norm": nn.LayerNorm(width), **linear}))
        self.head = nn.Linear(width, characters)

    def loss(self, text: torch.Tensor, where: torch.Tensor, attention: Any = ring_attention) -> torch.Tensor:
        """Return the share of the tokens at `where` in the mean loss of texts (batch, tokens + 1)."""
        x = self.characters(text[:, where]) + self.positions(where)
        for block in self.blocks:
            q, k, v = block["qkv"](block["norm"](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + block["out"](attention(q, k, v, causal=True).flatten(2))
            x = x + block["down"](gelu(block["up"](x)))
        targets = text[:, where + 1].flatten()
        return cross_entropy(self.head(x).flatten(0, 1), targets, reduction="sum") / text[:, 1:].numel()


def main(steps: int = 20, context: int = 64) -> None:
    if "RANK" not in os.environ:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    distributed.init_process_group("nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(distributed.get_rank() % torch.cuda.device_count())
        torch.set_default_device("cuda")
    where = local_positions(context).to(torch.get_default_device())
    data = torch.tensor([*(Path(__file__).parents[1] / "data" / "darwin_1859.txt").read_bytes()])
    torch.manual_seed(0)  # the same model and the same texts on all ranks
    model = GPT(256, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        text = data[torch.randint(len(data) - context, (4, 1)) + torch.arange(context + 1)]
        optimizer.zero_grad()
        loss = model.loss(text, where)
        loss.backward()
        for a in (loss.detach(), *(p.grad for p in model.parameters())):
            distributed.all_reduce(a)  # sum over all ranks: each has the gradients of its own tokens
        optimizer.step()
        if distributed.get_rank() == 0:
            print(f"step {step:3}  loss {loss.item():.3f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
