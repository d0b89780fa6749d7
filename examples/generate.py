"""Generation: a prefill, then one token at a time over a growing cache of keys and values.

python examples/generate.py [--tokens 16]

The mask is aligned to the bottom right: the last row sees every key, so that one call serves prefill and decoding. On
a GPU a growing cache compiles nothing: lengths are arguments of the kernels.
"""

from __future__ import annotations

import argparse

import torch

import flashwright as fw

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 8, 2, 64, 512


class Layer:
    """Random weights: what is shown is the cache, not the text."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=dtype) / shape[0] ** 0.5

        self.embed = weights(VOCABULARY, HEADS * HEAD_DIM)
        self.to_q = weights(HEADS * HEAD_DIM, HEADS * HEAD_DIM)
        self.to_k, self.to_v = (weights(HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM) for _ in range(2))
        self.to_logits = weights(HEADS * HEAD_DIM, VOCABULARY)

    def heads(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (x @ weights).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def __call__(self, tokens: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """Logits of every row; the keys and values of the tokens are added to the cache."""
        x = self.embed[tokens]
        new = [self.heads(x, self.to_k), self.heads(x, self.to_v)]
        cache[:] = [torch.cat(both, dim=2) for both in zip(cache, new, strict=True)] if cache else new
        out = fw.attention(self.heads(x, self.to_q), *cache, causal=True)
        return out.transpose(1, 2).flatten(2) @ self.to_logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16)
    count = parser.parse_args().tokens
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    layer = Layer(device, dtype)
    prompt = torch.randint(VOCABULARY, (1, 100), device=device)
    with torch.inference_mode():
        cache: list[torch.Tensor] = []
        tokens = [layer(prompt, cache)[:, -1:].argmax(-1)]
        for _ in range(count - 1):
            tokens.append(layer(tokens[-1], cache)[:, -1:].argmax(-1))
        whole = torch.cat([prompt, *tokens], dim=1)
        again = layer(whole[:, :-1], [])[:, prompt.shape[1] - 1 :].argmax(-1)
    generated = whole[:, prompt.shape[1] :]
    agreement = (generated == again).float().mean().item()
    print(f"{count} tokens on {device}, {cache[0].shape[2]} keys in the cache: {generated[0].tolist()}")
    print(f"{agreement:.0%} of them are those of one pass over the whole text")


if __name__ == "__main__":
    main()
