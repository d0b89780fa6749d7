"""Generation with transformers on a GPU: no kernel is compiled as the cache grows, and the tokens are those of fp32."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

from flashwright.integrations.transformers import register
from flashwright.runtime import loaded

pytestmark = pytest.mark.gpu

PROMPT = torch.tensor([[5, 17, 3, 88, 2, 41, 7]])
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)


def generated(model: Any, implementation: str, count: int, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model.generate(PROMPT.cuda(), min_new_tokens=count, max_new_tokens=count, **GREEDY, **options)


def worst_choice(model: Any, tokens: Any) -> float:
    """How far below the best logit of fp32 any of the generated tokens is."""
    reference = transformers.LlamaForCausalLM(model.config).eval().cuda()
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = reference(tokens[:, :-1]).logits[0, PROMPT.shape[1] - 1 :]
    chosen = logits.gather(1, tokens[0, PROMPT.shape[1] :, None])[:, 0]
    return float((logits.amax(-1) - chosen).max() / logits.std())


def test_a_thousand_tokens_compile_nothing_after_the_second(model, monkeypatch):
    generated(model, "flashwright", 2)

    def refuse(*of: Any) -> None:
        raise AssertionError(f"{of} is compiled")

    monkeypatch.setattr(loaded, "_load", refuse)
    tokens = generated(model, "flashwright", 1000)
    assert tokens.shape[1] == PROMPT.shape[1] + 1000
    assert worst_choice(model, tokens) <= max(0.02, 2 * worst_choice(model, generated(model, "sdpa", 1000)))


@pytest.mark.parametrize("options", ({"cache_implementation": "static"}, {}), ids=str)
def test_padded_batches_choose_the_tokens_of_fp32(model, options):
    model.set_attn_implementation("flashwright")
    batch = torch.cat((torch.zeros(1, 2, dtype=torch.long), PROMPT), 1).repeat(2, 1).cuda()
    mask = torch.ones_like(batch)
    mask[:, :2] = 0
    with torch.no_grad():
        tokens = model.generate(
            batch, attention_mask=mask, max_new_tokens=40, disable_compile=True, **GREEDY, **options
        )
    assert worst_choice(model, tokens[:1, 2:]) <= 0.02
    assert torch.equal(tokens[0], tokens[1])
