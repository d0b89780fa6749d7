"""What public functions say about arguments they cannot take: which one, what it is, and what is allowed."""

import numpy as np
import pytest

import flashwright as fw

torch = pytest.importorskip("torch")

CONFIG = "(BF16, 64, 64, 64, 4): async+load_0_2_2_tiles"
KERNEL = "__global__ void twice(float *x) { x[threadIdx.x] *= 2; }"
Q = torch.zeros(1, 4, 8, 64, dtype=torch.bfloat16)
CACHE = torch.zeros(2, 64, 2, 64, dtype=torch.bfloat16)
NEW_Q = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
STARTS = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize("wrong", [None, [[1.0]], "q", 3.0], ids=repr)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("q", lambda x: fw.attention(x, Q, Q)),
        ("k", lambda x: fw.flash_attn_func(Q, x, Q)),
        ("query", lambda x: fw.scaled_dot_product_attention(x, Q, Q)),
        ("value", lambda x: fw.scaled_dot_product_attention(Q, Q, x)),
        ("q", lambda x: fw.flash_attn_with_kvcache(x, CACHE, CACHE, cache_seqlens=3)),
        ("v_cache", lambda x: fw.flash_attn_with_kvcache(NEW_Q, CACHE, x, cache_seqlens=3)),
    ],
    ids=["attention", "flash_attn", "sdpa query", "sdpa value", "kvcache q", "kvcache v_cache"],
)
def test_what_is_no_tensor_is_named(name, call, wrong):
    with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got {type(wrong).__name__}$"):
        call(wrong)


@pytest.mark.parametrize("argument", ["k", "v", "rotary_cos", "rotary_sin", "cu_seqlens_q", "out"])
def test_optional_tensors_of_a_cache_are_named(argument):
    with pytest.raises(TypeError, match=f"^{argument}: expected a torch.Tensor, got str$"):
        fw.flash_attn_with_kvcache(NEW_Q, CACHE, CACHE, cache_seqlens=3, **{argument: "x"})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fw.flash_attn_with_kvcache(NEW_Q, CACHE, CACHE, cache_seqlens=np.zeros(2, np.int32)), TypeError,
            "cache_seqlens: expected an int32 tensor, got ndarray",
        ),
        (
            lambda: fw.flash_attn_with_kvcache(NEW_Q, CACHE, CACHE, cache_seqlens=torch.zeros(2)), TypeError,
            "cache_seqlens: expected an int32 tensor, got one of torch.float32",
        ),
        (
            lambda: fw.flash_attn_with_kvcache(NEW_Q, CACHE, CACHE, cache_seqlens=STARTS[:1]), ValueError,
            r"cache_seqlens: shape \(1,\) is not allowed; allowed: \(2\)",
        ),
        (
            lambda: fw.flash_attn_varlen_func(Q[0, :, :4], Q[0], Q[0], STARTS, STARTS, float("inf"), 8), TypeError,
            "max_seqlen_q: expected an integer, got inf",
        ),
        (lambda: fw.choice(None, Q, gpu="h200"), TypeError, "q: expected a tensor or an array, got NoneType"),
        (lambda: fw.choice(Q, [1], gpu="h200"), TypeError, "k: expected a tensor or an array, got list"),
        (lambda: fw.choice(Q, Q.half(), gpu="h200"), ValueError, "k: dtype torch.float16 differs from q's, torch.bfl"),
        (lambda: fw.parse_config(None), TypeError, "config: expected a text that names one, got NoneType"),
        (lambda: fw.compile_many(CONFIG), TypeError, r"configs: expected a list of configs or short forms, got '\(BF"),
        (lambda: fw.compile_many(None), TypeError, "configs: expected a list of configs or short forms, got None"),
        (lambda: fw.occupancy(CONFIG, "sm_80"), TypeError, "kernel: expected a compiled kernel, got str"),
        (lambda: fw.random_inputs(CONFIG), TypeError, r"config: expected a config, got str .*parse_config\(\)"),
        (
            lambda: fw.random_inputs(fw.parse_config(CONFIG), rows=1.5), TypeError,
            "rows: expected an integer of at least 0, got 1.5",
        ),
        (
            lambda: fw.random_inputs(fw.parse_config(CONFIG), keys=-1), ValueError,
            "keys: -1 is not allowed; allowed: integers of at least 0",
        ),
        (
            lambda: fw.simulate_forward(CONFIG, Q, Q, Q), TypeError,
            r"q: expected a NumPy array, got Tensor; run_forward\(…, device='simulator'\) takes",
        ),
        (lambda: fw.simulate_kernel(None), TypeError, r"source: expected CUDA C\+\+ or PTX, .* got NoneType"),
        (lambda: fw.simulate_kernel(KERNEL, args=None), TypeError, "args: expected a list .* got NoneType"),
        (lambda: fw.simulate_kernel(KERNEL, grid="x", args=[np.zeros(32)]), ValueError, "grid must be one .*'x'"),
        (lambda: fw.simulate_kernel(KERNEL, block=1.5, args=[np.zeros(32)]), ValueError, "block must be one to .* 1.5"),
    ],
)  # fmt: skip
def test_the_argument_the_value_and_what_is_allowed_are_named(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()
