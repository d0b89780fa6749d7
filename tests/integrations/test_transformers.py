"""`attn_implementation="flashwright"` in Hugging Face transformers, on tiny random models on the CPU."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")

from transformers import masking_utils

from flashwright import integrations
from flashwright.integrations.carried_masks import ranges_of_padding, rows_of_sequences
from flashwright.integrations.transformers import attention_forward, attention_mask, register

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Qwen3": {"head_dim": 24},
    "Gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(integrations, "_said", set())
    register()
    register()


@cache
def model(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **MODELS[family])
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(rows: int = 13) -> Any:
    return torch.randint(0, VOCABULARY, (2, rows), generator=torch.Generator().manual_seed(1))


def by(implementation: str, family: str, what: Any) -> Any:
    one = model(family)
    one.set_attn_implementation(implementation)
    with torch.no_grad():
        return what(one)


def peer(family: str) -> str:
    """What to compare with: SDPA, unless it ignores what the model asks for."""
    return "eager" if "attn_logit_softcapping" in MODELS[family] else "sdpa"


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_the_same(family):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = by("flashwright", family, lambda m: m(tokens()).logits)
    torch.testing.assert_close(logits, by(peer(family), family, lambda m: m(tokens()).logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_generation_with_a_cache_is_the_same(family, cache_implementation):
    def generated(m: Any) -> Any:
        return m.generate(
            tokens(), max_new_tokens=10, do_sample=False, pad_token_id=0, disable_compile=True,
            cache_implementation=cache_implementation,
        )  # fmt: skip

    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if cache_implementation else "error")
        actual = by("flashwright", family, generated)
    assert torch.equal(actual, by(peer(family), family, generated))


@pytest.mark.parametrize("family", MODELS)
def test_rows_added_to_a_cache_several_at_a_time_see_all_before_them(family):
    def in_two_parts(m: Any) -> Any:
        first = m(tokens()[:, :9], use_cache=True)
        return m(tokens()[:, 9:], past_key_values=first.past_key_values).logits

    expected = by(peer(family), family, lambda m: m(tokens()).logits[:, 9:])
    torch.testing.assert_close(by("flashwright", family, in_two_parts), expected, rtol=1e-4, atol=1e-5)


def padding(side: str, rows: int = 13) -> Any:
    mask = torch.ones(2, rows, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return mask


@pytest.fixture
def no_sdpa(monkeypatch):
    """PyTorch's function computes nothing."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("PyTorch's SDPA was called")

    return lambda: monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)


@pytest.mark.parametrize("side", ("left", "right"))
@pytest.mark.parametrize("family", MODELS)
def test_padded_batches_are_computed_by_the_kernels(family, side, no_sdpa):
    mask = padding(side)
    expected = by(peer(family), family, lambda m: m(tokens(), attention_mask=mask).logits)
    no_sdpa()
    logits = by("flashwright", family, lambda m: m(tokens(), attention_mask=mask).logits)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("cache_implementation", (None, "static"))
def test_a_batch_that_is_padded_on_the_left_generates_the_same(family, cache_implementation, no_sdpa):
    def generated(m: Any) -> Any:
        return m.generate(
            tokens(), attention_mask=padding("left"), max_new_tokens=8, do_sample=False, pad_token_id=0,
            disable_compile=True, cache_implementation=cache_implementation,
        )  # fmt: skip

    expected = by(peer(family), family, generated)
    no_sdpa()
    assert torch.equal(by("flashwright", family, generated), expected)


def test_latent_attention_has_values_of_another_head_dimension(no_sdpa):
    sizes = SIZES | {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    one = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).eval()
    mask = torch.ones_like(tokens())
    mask[0, :4] = 0
    generated = []
    for implementation in ("sdpa", "flashwright"):
        one.set_attn_implementation(implementation)
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        generated.append(one.generate(tokens(), attention_mask=mask, **options))
        no_sdpa()
    assert torch.equal(*generated)


@pytest.mark.parametrize("family", ("Llama", "Qwen2"))
def test_holes_in_a_mask_go_to_pytorch_with_one_warning(family):
    mask = padding("left")
    mask[1, 6] = 0
    with pytest.warns(UserWarning, match="a mask that is more than causal") as said:
        logits = by("flashwright", family, lambda m: m(tokens(), attention_mask=mask).logits)
    assert len(said) == 1
    expected = by(peer(family), family, lambda m: m(tokens(), attention_mask=mask).logits)
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ("Llama", "Qwen2"))
def test_sequences_packed_by_their_positions_do_not_see_each_other(family, no_sdpa):
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None].expand(2, -1)

    def packed(m: Any) -> Any:
        return m(tokens(), position_ids=positions, use_cache=False).logits

    expected = by("sdpa", family, packed)
    alone = by("sdpa", family, lambda m: m(tokens()[:, 5:]).logits)
    no_sdpa()
    actual = by("flashwright", family, packed)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[:, 5:], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ("left", "right"))
def test_padded_batches_have_the_same_gradients(side, no_sdpa):
    mask = padding(side)
    labels = tokens().masked_fill(mask == 0, -100)
    gradients = {}
    for implementation in ("sdpa", "flashwright"):
        one = model("Llama")
        one.set_attn_implementation(implementation)
        one.zero_grad()
        one(tokens(), attention_mask=mask, labels=labels).loss.backward()
        gradients[implementation] = [p.grad.clone() for p in one.parameters()]
        no_sdpa()
    for a, b in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rows", "window"), ((2, None), (9, None), (9, 3)))
def test_padded_keys_of_bidirectional_attention_are_not_seen(rows, window, no_sdpa):
    q, k = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 9, 16)
    keys = padding("left", 9).bool()
    overlay = masking_utils.sliding_window_bidirectional_mask_function(window) if window else None
    function = overlay or masking_utils.bidirectional_mask_function
    mask = attention_mask(
        2, rows, 9, mask_function=function, attention_mask=keys, allow_is_bidirectional_skip=True, device="cpu",
        local_size=window,
    )  # fmt: skip
    assert mask.dtype == torch.int32
    visible = keys[:, None, None].expand(2, 1, rows, 9)
    if window:
        distance = torch.arange(9) - torch.arange(rows)[:, None]
        visible = visible & (distance.abs() < window)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=visible, enable_gqa=True)
    no_sdpa()
    out, _ = attention_forward(torch.nn.Module(), q, k, k, mask, is_causal=False, sliding_window=window)
    counts = visible.any(-1).expand(2, 4, rows) & (keys[:, None, :rows] if window else True)
    torch.testing.assert_close(out.transpose(1, 2)[counts], expected[counts])


def test_what_is_carried_becomes_a_mask_where_pytorch_computes():
    q = torch.randn(2, 2, 6, 16)
    packed = rows_of_sequences(torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 2, 2]])).as_mask()
    ranges = ranges_of_padding(padding("left", 6)[:, :6].bool(), 2, 6, 6, 0, "cpu").as_mask()
    for mask in (packed, ranges):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            by_pytorch, _ = attention_forward(torch.nn.Module(), q, q, q, mask, dropout=1e-9, is_causal=True)
        out, _ = attention_forward(torch.nn.Module(), q, q, q, mask, is_causal=True)
        counts = padding("left", 6).bool() if mask is ranges else torch.ones(2, 6, dtype=torch.bool)
        torch.testing.assert_close(out[counts], by_pytorch[counts])


def test_a_compiled_step_with_a_static_cache_has_no_graph_breaks():
    one = model("Llama")
    one.set_attn_implementation("flashwright")
    torch._dynamo.reset()
    step = torch.compile(one, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        caches = [transformers.StaticCache(config=one.config, max_cache_len=20) for _ in range(2)]
        for cache in caches:
            one(tokens()[:, :9], past_key_values=cache)
        expected = one(tokens()[:, 9:10], past_key_values=caches[0]).logits
        actual = step(tokens()[:, 9:10], past_key_values=caches[1]).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_continuous_batching_generates_the_same(no_sdpa):
    if transformers.__version__ < "5.18":
        pytest.importorskip("psutil", reason="without it, such versions find no memory on a CPU")
    prompts = [[1, 2, 3, 4, 5], [7, 8, 9], [11] * 9]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = [
        by("sdpa", "Llama", lambda m, p=p: m.generate(torch.tensor([p]), **options)[0, len(p) :].tolist())
        for p in prompts
    ]
    no_sdpa()
    generated = by(
        "flashwright", "Llama", lambda m: m.generate_batch(
            prompts, generation_config=transformers.GenerationConfig(**options, eos_token_id=-1),
            continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32),
        )
    )  # fmt: skip
    assert [each.generated_tokens for each in generated.values()] == expected


def test_models_with_a_fixed_table_of_classes_say_so():
    with pytest.raises(
        ValueError, match=r"'flashwright': Git\w+ takes its attention from a table of its own, GIT_SELF_"
    ):
        transformers.GitModel._from_config(transformers.GitConfig(), attn_implementation="flashwright")


def test_packed_sequences_do_not_see_each_other():
    first, second = tokens()[:1, :5], tokens()[1:, :8]
    starts = torch.tensor([0, 5, 13], dtype=torch.int32)

    def packed(m: Any) -> Any:
        return m(
            torch.cat((first, second), dim=1), position_ids=torch.cat((torch.arange(5), torch.arange(8)))[None],
            cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=8, max_length_k=8,
        ).logits  # fmt: skip

    actual = by("flashwright", "Llama", packed)
    expected = [by("sdpa", "Llama", lambda m, x=x: m(x).logits) for x in (first, second)]
    torch.testing.assert_close(actual, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)


def test_training_gives_the_same_gradients():
    gradients = {}
    for implementation in ("flashwright", "sdpa"):
        one = model("Llama")
        one.set_attn_implementation(implementation)
        one.zero_grad()
        one(tokens(), labels=tokens()).loss.backward()
        gradients[implementation] = [p.grad.clone() for p in one.parameters()]
    for a, b in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_compiled_model_has_no_graph_breaks():
    torch._dynamo.reset()
    one = model("Llama")
    one.set_attn_implementation("flashwright")
    with torch.no_grad():
        expected = one(tokens(), use_cache=False).logits
        actual = torch.compile(one, fullgraph=True, backend="aot_eager")(tokens(), use_cache=False).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_attention_sinks_are_refused_by_name():
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="s_aux"):
        attention_forward(torch.nn.Module(), q, q, q, None, s_aux=torch.ones(2))


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_bidirectional_attention_and_fallbacks_see_the_same_keys(dropout):
    module = torch.nn.Module()
    q = torch.randn(1, 2, 7, 16)
    for options in ({"is_causal": False}, {"is_causal": True}, {"is_causal": True, "sliding_window": 3}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out, _ = attention_forward(module, q[:, :, 4:], q, q, None, dropout=dropout, **options)
        if options["is_causal"]:
            window = options.get("sliding_window", 99)
            visible = [[i - window < j <= i for j in range(7)] for i in range(4, 7)]
        else:
            visible = [[True] * 7] * 3
        expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, 4:], q, q, attn_mask=torch.tensor(visible))
        torch.testing.assert_close(out, expected.transpose(1, 2))


def test_only_what_the_kernels_cannot_know_becomes_a_mask():
    common = {"batch_size": 2, "kv_length": 8, "device": "cpu", "config": None}
    assert attention_mask(**common, q_length=8) is None
    assert attention_mask(**common, q_length=3, q_offset=5) is None
    assert attention_mask(**common, q_length=8, attention_mask=torch.ones(2, 8, dtype=torch.bool)) is None
    room_for_more = attention_mask(**common, q_length=3, q_offset=2)
    assert room_for_more.flatten().tolist() == 2 * [0, 5, 2]
    padded = torch.ones(2, 8, dtype=torch.bool)
    padded[0, -1] = False
    assert attention_mask(**common, q_length=8, attention_mask=padded) is None, "no row that counts sees it"
    padded[0, 0] = False
    assert attention_mask(**common, q_length=8, attention_mask=padded)[:, 0, 0, :3].tolist() == [[1, 7, 0], [0, 8, 0]]
    padded[0, 4] = False
    assert attention_mask(**common, q_length=8, attention_mask=padded).shape == (2, 1, 8, 8)
