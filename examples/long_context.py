"""Long sequences: a small language model trained on sequences that several ranks share.

torchrun --nproc-per-node 4 examples/long_context.py [--steps 20] [--rows 1024]

Each rank holds a part of every sequence, and attention goes over all of it. Without torchrun one process holds
everything. On GPUs NCCL carries the messages, on CPUs gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from flashwright import distributed

TEXT = "the ring passes keys, the keys meet queries, the queries wait for the ring. " * 40
VOCABULARY = sorted(set(TEXT))
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
HIDDEN = HEADS * HEAD_DIM


class Model(nn.Module):
    """Everything but attention works on rows by themselves, and needs no other rank."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(len(VOCABULARY), HIDDEN), nn.Embedding(rows, HIDDEN)
        self.to_q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.to_kv = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.norm, self.to_logits = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, len(VOCABULARY))
        self.rows = rows

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        batch, rows = tokens.shape
        x = self.embed(tokens) + self.positions(positions)
        q = self.to_q(self.norm(x)).view(batch, rows, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = self.to_kv(self.norm(x)).view(batch, rows, 2, KV_HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        out = distributed.attention(q, k, v, causal=True, length=self.rows)  # rows of this rank, keys of all
        return self.to_logits(x + out.transpose(1, 2).reshape(batch, rows, HIDDEN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1024)
    arguments = parser.parse_args()
    shared = "RANK" in os.environ  # set by torchrun
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if shared:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)

    torch.manual_seed(0)  # the same parameters and sequences on all ranks
    model = Model(arguments.rows).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor([VOCABULARY.index(character) for character in TEXT], device=device)
    positions = distributed.positions(arguments.rows, device=device)
    losses = []
    for start in torch.randint(len(TEXT) - arguments.rows - 1, (arguments.steps,)).tolist():
        whole = text[start : start + arguments.rows + 1][None]
        tokens, labels = distributed.shard(whole[:, :-1], dim=1), distributed.shard(whole[:, 1:], dim=1)
        logits = model(tokens, positions).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / arguments.rows
        loss.backward()
        total = loss.detach()
        if shared:  # the loss is the sum of the ranks' parts, and so are its gradients
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    if rank == 0:
        print(
            f"{ranks} ranks on {device}, {len(positions)} of {arguments.rows} rows here: {arguments.steps} steps, "
            f"loss {losses[0]:.4f} → {losses[-1]:.4f}"
        )
    if shared:
        dist.barrier()  # no rank leaves while another still receives
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
