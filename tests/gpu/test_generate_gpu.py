"""Generation with transformers on a GPU: no kernel is compiled as the cache grows, and the tokens are those of fp32.

The model's output is what its attention gives: a padded token that is seen moves its logits by several standard
deviations, rounding to bf16 by some hundredths of one.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

from flashwright.integrations.transformers import register
from flashwright.runtime import loaded

pytestmark = [pytest.mark.gpu, pytest.mark.long]

PROMPTS = [[5, 17, 3, 88, 2, 41, 7], [9, 60, 33, 2], [71]]


@pytest.fixture(scope="module")
def model() -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    made.model.layers[0].mlp.down_proj.weight.data *= 0.05
    return made.to("cuda", torch.bfloat16)


@pytest.fixture(scope="module")
def in_fp32(model) -> Any:
    reference = transformers.LlamaForCausalLM(copy.deepcopy(model.config)).eval().cuda()
    reference.load_state_dict(model.state_dict())
    reference.set_attn_implementation("sdpa")
    return reference


def generated(model: Any, implementation: str, prompts: list[list[int]], count: int, **options: Any) -> Any:
    """Of prompts padded on the left: the tokens of each sequence without its padding, and the logits they are of."""
    model.set_attn_implementation(implementation)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]).cuda()
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]).cuda()
    with torch.no_grad():
        result = model.generate(
            tokens, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0,
            eos_token_id=None, disable_compile=True, return_dict_in_generate=True, output_logits=True, **options,
        )  # fmt: skip
    sequences = [row[longest - len(prompt) :] for row, prompt in zip(result.sequences, prompts, strict=True)]
    return sequences, torch.stack(result.logits, 1)


def expected_logits(in_fp32: Any, sequence: Any, count: int) -> Any:
    """Of the last `count` tokens of a sequence."""
    with torch.no_grad():
        return in_fp32(sequence[None, :-1]).logits[0, -count:]


def error(logits: Any, expected: Any) -> float:
    """Root mean square, in standard deviations of what is expected."""
    return float((logits.float() - expected).pow(2).mean().sqrt() / expected.std())


def agreement(tokens: Any, expected: Any) -> float:
    """How many of the last tokens are those with the best logits in fp32."""
    return float((tokens[-len(expected) :] == expected.argmax(-1)).float().mean())


def test_a_thousand_tokens_compile_nothing_after_the_second(model, in_fp32, monkeypatch):
    generated(model, "flashwright", PROMPTS[:1], 2)

    def refuse(*of: Any) -> None:
        raise AssertionError(f"{of} is compiled")

    monkeypatch.setattr(loaded, "_load", refuse)
    (tokens,), logits = generated(model, "flashwright", PROMPTS[:1], 1000)
    assert len(tokens) == len(PROMPTS[0]) + 1000
    expected = expected_logits(in_fp32, tokens, 1000)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        by_sdpa = model(tokens[None, :-1]).logits[0, -1000:]
    assert error(logits[0], expected) <= 1.5 * error(by_sdpa, expected) < 0.1
    assert agreement(tokens, expected) >= agreement(by_sdpa.argmax(-1), expected) - 0.02


@pytest.mark.parametrize("options", ({"cache_implementation": "static"}, {}), ids=str)
def test_padded_batches_choose_the_tokens_of_fp32(model, in_fp32, options):
    errors, agreements = {}, {}
    for implementation in ("sdpa", "flashwright"):
        sequences, logits = generated(model, implementation, PROMPTS, 40, **options)
        expected = [expected_logits(in_fp32, tokens, 40) for tokens in sequences]
        errors[implementation] = max(map(error, logits, expected))
        agreements[implementation] = min(map(agreement, sequences, expected))
    assert errors["flashwright"] <= 1.5 * errors["sdpa"] < 0.1
    assert agreements["flashwright"] >= agreements["sdpa"] - 0.05


@pytest.fixture
def inputs_are_cleared_before_they_are_filled(monkeypatch):
    """Continuous batching clears its tensors on the default stream and fills them on another, which does not wait
    (transformers 5.17 to 5.23): on a busy GPU the first batch is lost, whatever computes the attention."""
    from transformers.generation.continuous_batching.input_outputs import HostDeviceIOPair

    fill = HostDeviceIOPair.transfer_inputs_h2d

    def wait_and_fill(*arguments: Any) -> None:
        torch.cuda.default_stream().synchronize()
        fill(*arguments)

    monkeypatch.setattr(HostDeviceIOPair, "transfer_inputs_h2d", wait_and_fill)


@pytest.mark.usefixtures("inputs_are_cleared_before_they_are_filled")
def test_continuous_batching_with_a_paged_cache_chooses_the_tokens_of_fp32(model, in_fp32, monkeypatch):
    model.set_attn_implementation("flashwright")
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
        results = model.generate_batch(
            PROMPTS,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=-1
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        )
    for prompt, result in zip(PROMPTS, results.values(), strict=True):
        tokens = torch.tensor(prompt + result.generated_tokens).cuda()
        assert agreement(tokens, expected_logits(in_fp32, tokens, 20)) >= 0.8
