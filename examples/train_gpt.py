"""Training beside PyTorch: a small GPT, once with PyTorch's SDPA and once with `flashwright.attention`.

python examples/train_gpt.py [--steps 240] [--positions learned] [--plot losses.png] [--output losses.json]
    [--from losses.json]

Both start from the same weights and see the same batches of a text that is made here: who gives what to whom. They take
turns of a few steps each; the first turn of each is not timed. Their losses should lie on top of each other. On a GPU
they compute in bf16; on a CPU, smaller models compute in fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashwright as fw

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fw.attention(q, k, v, causal=True)


SDPA, OURS = "PyTorch SDPA", "Flashwright"
IMPLEMENTATIONS: dict[str, Attend] = {SDPA: sdpa, OURS: ours}


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    head_dim: int
    rows: int
    batch: int
    characters: int
    """Of the text."""
    steps: int
    turn: int
    """Steps of one model before it is the other's turn."""
    positions: str = "rotary"
    """Or "learned": an embedding of each row's number."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


ON_GPU = Size(layers=4, heads=6, head_dim=128, rows=16_384, batch=1, characters=1_000_000, steps=240, turn=20)
ON_CPU = Size(layers=2, heads=2, head_dim=32, rows=128, batch=4, characters=20_000, steps=20, turn=4)


# --- The text --------------------------------------------------------------------------------------------------------


NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ida Jon Kim Lea Max Nora Otto Pia Quin Rosa Sam Tom Uma Vera Will Zoe"
COLOURS = "red green blue white black brown grey golden silver purple orange yellow"
THINGS = "ball book boat bell box drum flag fork harp hat jar kite lamp leaf mask pen ring rope spoon toy urn vase"


def text_of(characters: int) -> str:
    """Who gives what to whom; the second sentence follows from the first."""
    draw = random.Random(0)
    names, colours, things = (words.split() for words in (NAMES, COLOURS, THINGS))
    parts: list[str] = []
    length = 0
    while length < characters:
        giver, taker = draw.sample(names, 2)
        gift = f"{draw.choice(colours)} {draw.choice(things)}"
        parts.append(f"{giver} gives {taker} the {gift}. Now {taker} has the {gift}, and {taker} thanks {giver}.\n")
        length += len(parts[-1])
    return "".join(parts)[:characters]


def batches_of(text: str, vocabulary: list[str], size: Size, steps: int, device: str) -> list[torch.Tensor]:
    """One character more than rows in each sequence: inputs and, one later, targets."""
    number_of = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([number_of[character] for character in text], device=device)
    draw = random.Random(1)
    return [
        torch.stack([tokens[first : first + size.rows + 1] for first in starts])
        for starts in ([draw.randrange(len(text) - size.rows) for _ in range(size.batch)] for _ in range(steps))
    ]


# --- The model -------------------------------------------------------------------------------------------------------


def rotated(x: torch.Tensor) -> torch.Tensor:
    """(batch, rows, heads, head_dim) with rotary positions."""
    half = x.shape[3] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[1], device=x.device)[:, None, None] * speeds
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attend) -> None:
        super().__init__()
        self.size, self.attend = size, attend
        hidden = size.hidden
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.to_qkv, self.to_out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, hidden = x.shape
        q, k, v = self.to_qkv(self.norm_1(x)).view(batch, rows, 3, self.size.heads, self.size.head_dim).unbind(2)
        if self.size.positions == "rotary":
            q, k = rotated(q), rotated(k)
        out = self.attend(*(each.transpose(1, 2) for each in (q, k, v)))  # any strides will do
        x = x + self.to_out(out.transpose(1, 2).reshape(batch, rows, hidden))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, size: Size, vocabulary: int, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size.hidden)
        self.positions = nn.Embedding(size.rows, size.hidden) if size.positions == "learned" else None
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm, self.to_logits = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, vocabulary)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        return self.to_logits(self.norm(self.blocks(x)))


# --- Training --------------------------------------------------------------------------------------------------------


class Training:
    """One of the two models, its optimizer, and what was measured."""

    def __init__(self, model: GPT, device: str, steps: int) -> None:
        self.model, self.device = model, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
        ramp = max(1, steps // 20)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / ramp))
        self.losses: list[torch.Tensor] = []
        self.seconds_per_step: list[float] = []

    def take(self, batches: list[torch.Tensor]) -> None:
        """A turn."""
        began = self._seconds()
        for tokens in batches:
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                logits = self.model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.losses.append(loss.detach())
        self.seconds_per_step.append((self._seconds() - began) / len(batches))

    def _seconds(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(size: Size, steps: int, device: str) -> dict[str, Any]:
    """The losses of both, and their tokens per second."""
    if device == "cuda":  # no step of the training waits for the compiler
        fw.warm_up(size.head_dim, torch.bfloat16, causal=True, training=True)
    text = text_of(size.characters)
    vocabulary = sorted(set(text))
    batches = batches_of(text, vocabulary, size, steps, device)
    torch.manual_seed(0)
    first = GPT(size, len(vocabulary), sdpa).to(device)
    trainings = {}
    for name, attend in IMPLEMENTATIONS.items():
        model = copy.deepcopy(first)
        for block in model.blocks:
            block.attend = attend
        trainings[name] = Training(model, device, steps)
    for begin in range(0, steps, size.turn):
        for training in trainings.values():
            training.take(batches[begin : begin + size.turn])
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "flashwright": fw.__version__,
        "size": asdict(size),
        "losses": {name: torch.stack(each.losses).tolist() for name, each in trainings.items()},
        "tokens_per_second": {
            name: size.batch * size.rows / statistics.median(each.seconds_per_step[1:] or each.seconds_per_step)
            for name, each in trainings.items()
        },
    }


# --- The result ------------------------------------------------------------------------------------------------------


def difference(result: dict[str, Any]) -> float:
    """The largest of any step."""
    losses = result["losses"]
    return max(abs(a - b) for a, b in zip(losses[SDPA], losses[OURS], strict=True))


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, colour, width in ((SDPA, "#56b4e9", 5), (OURS, "#d55e00", 1.4)):
        label = f"{name}: {result['tokens_per_second'][name]:,.0f} tokens/s"
        axes.plot(
            range(1, len(result["losses"][name]) + 1), result["losses"][name], color=colour, lw=width, label=label
        )
    size = Size(**result["size"])
    axes.set_title(
        f"A GPT of {size.layers} layers, {size.heads} heads of {size.head_dim}, {size.batch} × {size.rows:,} tokens a "
        f"step, {result['device']}",
        fontsize=9,
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each model")
    parser.add_argument("--positions", choices=("rotary", "learned"), default="rotary")
    parser.add_argument("--plot", type=Path, help="draw the losses to this .png or .svg file")
    parser.add_argument("--output", type=Path, help="write losses and speeds to this JSON file")
    parser.add_argument("--from", dest="stored", type=Path, help="show such a file, and train nothing")
    arguments = parser.parse_args()
    if arguments.stored:
        result = json.loads(arguments.stored.read_text())
    else:
        device, size = ("cuda", ON_GPU) if torch.cuda.is_available() else ("cpu", ON_CPU)
        size = replace(size, positions=arguments.positions)
        result = train(size, size.steps if arguments.steps is None else arguments.steps, device)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        plot(result, arguments.plot)
    for name, losses in result["losses"].items():
        speed = result["tokens_per_second"][name]
        print(
            f"{name + ':':14} {len(losses)} steps on {result['device']}, loss {losses[0]:.3f} → {losses[-1]:.3f}, "
            f"{speed:,.0f} tokens/s"
        )
    ratio = result["tokens_per_second"][OURS] / result["tokens_per_second"][SDPA]
    print(f"{ratio:.2f} × the speed of PyTorch's; losses differ by at most {difference(result):.1e} in any step")


if __name__ == "__main__":
    main()
