"""Training: a small language model whose attention is `flashwright.attention`, with gradients.

python examples/train.py [--steps 20]

On a GPU the kernels compute in bf16; on a CPU, PyTorch's reference computes in fp32.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import flashwright as fw

TEXT = "the kernel waits for the copy, the copy waits for the barrier, the barrier waits for the kernel. " * 20
VOCABULARY = sorted(set(TEXT))
HEADS, KV_HEADS, HEAD_DIM, ROWS = 4, 2, 32, 64
HIDDEN = HEADS * HEAD_DIM


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.to_kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.to_out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, _ = x.shape
        q = self.to_q(x).view(batch, rows, HEADS, HEAD_DIM).transpose(1, 2)  # any strides will do: nothing is copied
        k, v = self.to_kv(x).view(batch, rows, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        out = fw.attention(q, k, v, causal=True)  # grouped heads: two heads of q share one of k and v
        return self.to_out(out.transpose(1, 2).reshape(batch, rows, HIDDEN))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(VOCABULARY), HIDDEN)
        self.positions = nn.Embedding(ROWS, HIDDEN)
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.to_logits = nn.Linear(HIDDEN, len(VOCABULARY))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.to_logits(x + self.attention(self.norm(x)))


def batches(device: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.tensor([VOCABULARY.index(character) for character in TEXT], device=device)
    starts = torch.randint(len(TEXT) - ROWS - 1, (count, 8))
    rows = [torch.stack([tokens[start : start + ROWS + 1] for start in some]) for some in starts.tolist()]
    return [(each[:, :-1], each[:, 1:]) for each in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    if on_gpu:  # no step of the training waits for the compiler
        fw.warm_up(HEAD_DIM, dtype, causal=True, grouped=True, training=True)
    model = Model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in batches(device, steps):
        loss = nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{steps} steps on {device}: loss {losses[0]:.2f} → {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
