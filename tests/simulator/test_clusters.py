"""Thread-block clusters: barriers, distributed shared memory, multicast, remote mbarriers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashwright.hardware.tensor_map import TensorMap
from flashwright.simulator import SimulatedGPU, SimulationError

from .hopper_tools import BF16, compile_hopper, run_cluster_descriptors

HELPERS = r"""
D u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
D u32 map(u32 a, u32 r) {
  u32 d; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(r)); return d; }
D void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
D void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
D void cluster_sync() { cluster_arrive(); cluster_wait(); }
D u32 load_remote(u32 a) {
  u32 v; asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
D void store_remote(u32 a, u32 v) { asm volatile("st.shared::cluster.b32 [%0], %1;" :: "r"(a), "r"(v) : "memory"); }
"""


def run(body: str, outputs: int, *, grid: Any = 4, block: int = 32, cluster: Any = 2, args: tuple[Any, ...] = (),
        gpu: SimulatedGPU | None = None, parameters: str = "", **options: Any) -> np.ndarray:  # fmt: skip
    """``body`` writes u32s to out; t is the thread, b the block's number in the grid."""
    source = (
        HELPERS
        + f"""extern "C" __global__ void k(u32 *out{parameters}) {{
      const u32 t = threadIdx.x, b = blockIdx.x + gridDim.x * blockIdx.y; {body} }}"""
    )
    gpu = gpu or SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(outputs, np.uint32))
    module = gpu.load(compile_hopper(source))
    module.launch("k", grid, block, options.pop("shared_bytes", 0), [out, *args], cluster=cluster, **options)
    return gpu.to_host(out)


def test_blocks_of_a_cluster_know_their_place() -> None:
    body = """u32 x, y, cx, cy, n, nc;
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x)); asm("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(y));
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(cx)); asm("mov.u32 %0, %%clusterid.y;" : "=r"(cy));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n)); asm("mov.u32 %0, %%nclusterid.y;" : "=r"(nc));
    if (t == 0) out[b] = rank() | x << 4 | y << 8 | cx << 12 | cy << 16 | n << 20 | nc << 24;"""
    found = run(body, 4 * 6, grid=(4, 6), cluster=(2, 3)).reshape(6, 4)
    for (y, x), value in np.ndenumerate(found):
        rank = x % 2 + 2 * (y % 3)
        assert value == rank | (x % 2) << 4 | (y % 3) << 8 | (x // 2) << 12 | (y // 3) << 16 | 6 << 20 | 2 << 24


def test_blocks_read_each_others_shared_memory() -> None:
    body = """__shared__ u32 s[32]; s[t] = 100 * b + t; cluster_sync();
    out[b * 32 + t] = load_remote(map(addr(s), rank() ^ 1) + 4 * (31 - t)); cluster_sync();"""
    expected = [100 * (b ^ 1) + 31 - t for b in range(4) for t in range(32)]
    assert run(body, 128).tolist() == expected


def test_blocks_write_and_add_to_each_others_shared_memory() -> None:
    body = """__shared__ u32 s[33]; if (t == 0) s[32] = 0; cluster_sync();
    store_remote(map(addr(s), (rank() + 1) % 4) + 4 * t, 10 * rank() + t);
    u32 old;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], 1;" : "=r"(old) : "r"(map(addr(s + 32), 0)) : "memory");
    cluster_sync(); out[b * 33 + t] = s[t]; if (t == 0) out[b * 33 + 32] = s[32];"""
    found = run(body, 4 * 33, cluster=4).reshape(4, 33)
    for block in range(4):
        assert found[block, :32].tolist() == [10 * ((block - 1) % 4) + t for t in range(32)]
    assert found[:, 32].tolist() == [128, 0, 0, 0]


def test_generic_addresses_reach_other_blocks() -> None:
    body = """__shared__ u32 s[32]; s[t] = b * 32 + t; cluster_sync();
    u64 p; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"((u64)(s + t)), "r"(rank() ^ 1));
    u32 r; asm volatile("getctarank.u64 %0, %1;" : "=r"(r) : "l"(p));
    out[b * 32 + t] = *(volatile u32 *)p | r << 16; cluster_sync();"""
    expected = [(b ^ 1) * 32 + t | ((b ^ 1) % 2) << 16 for b in range(4) for t in range(32)]
    assert run(body, 128).tolist() == expected


def test_arrival_and_wait_are_apart() -> None:
    """Threads do something else between them; who comes late to the wait finds the barrier open."""
    body = """__shared__ u32 s[64]; s[t] = b; cluster_arrive(); u32 x = t;
    if (rank()) for (u32 i = 0; i < 50; ++i) x = x * 3 + 1;
    cluster_wait();
    out[b * 64 + t] = s[63 - t] * 1000 + load_remote(map(addr(s), rank() ^ 1)) + 0 * x; cluster_sync();"""
    found = run(body, 4 * 64, block=64)
    assert found.tolist() == [b * 1000 + (b ^ 1) for b in range(4) for _ in range(64)]


def test_without_the_barrier_a_block_reads_too_early_or_not_what_it_should() -> None:
    """Within a block, a cluster barrier orders accesses, and its absence is a race."""
    body = "__shared__ u32 s[64]; s[t] = b; BARRIER out[b * 64 + t] = s[63 - t];"
    run(body.replace("BARRIER", "cluster_sync();"), 256, block=64)
    with pytest.raises(SimulationError) as caught:
        run(body.replace("BARRIER", ""), 256, block=64)
    assert caught.value.kind in ("race", "uninitialised-shared")


def test_memory_of_a_block_that_has_ended_is_out_of_bounds() -> None:
    body = """__shared__ u32 s[32]; s[t] = b; if (rank() == 0) return;
    cluster_sync(); out[t] = load_remote(map(addr(s), 0));"""
    with pytest.raises(SimulationError, match="that has ended") as caught:
        run(body, 32, grid=2)
    assert caught.value.kind == "out-of-bounds"


WHILE_OTHERS_ACCESS = {
    "load": "out[b * 32 + t] = load_remote(map(addr(s), rank() ^ 1) + 4 * t);",
    "store": "store_remote(map(addr(s), rank() ^ 1) + 4 * t, b);",
    "arrival": """asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
        :: "r"(map(addr(&bar), rank() ^ 1)) : "memory");""",
    "copy": """if (t == 0) { expect(addr(&bar), 128); asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
        :: "r"(map(addr(r), rank() ^ 1)), "r"(addr(s)), "r"(map(addr(&bar), rank() ^ 1)) : "memory"); }
        if (t) arrive(addr(&bar)); wait(addr(&bar), 0);""",
}


@pytest.mark.parametrize("access", WHILE_OTHERS_ACCESS)
def test_a_block_begins_before_others_access_its_memory_and_ends_after(access: str) -> None:
    body = f"""__shared__ __align__(16) u32 s[32], r[32]; __shared__ u64 bar;
    s[t] = b; if (t == 0) {{ init(addr(&bar), 32); init_fence(); }} proxy_fence(); BEGIN __syncthreads();
    {WHILE_OTHERS_ACCESS[access]} END"""
    run(body.replace("BEGIN", "cluster_sync();").replace("END", "cluster_sync();"), 128)
    for begin, end, what in (("cluster_sync();", "", "may have ended"), ("", "cluster_sync();", "may not have begun")):
        with pytest.raises(SimulationError, match=what) as caught:
            run(body.replace("BEGIN", begin).replace("END", end), 128)
        assert caught.value.kind == "race" and caught.value.source_line is not None


def test_a_block_may_end_when_an_mbarrier_has_told_it_of_all_accesses() -> None:
    body = """__shared__ u32 s[32]; __shared__ u64 bar; s[t] = b; if (t == 0) { init(addr(&bar), 32); init_fence(); }
    cluster_sync(); out[b * 32 + t] = load_remote(map(addr(s), rank() ^ 1) + 4 * t);
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
        :: "r"(map(addr(&bar), rank() ^ 1)) : "memory"); wait(addr(&bar), 0);"""
    assert run(body, 128).tolist() == [b ^ 1 for b in range(4) for _ in range(32)]


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("if (rank() == 0) cluster_sync(); else cluster_arrive(), cluster_arrive();", "barrier", "twice"),
        ("cluster_wait();", "barrier", "without barrier.cluster.arrive"),
        ('if (t < 32 || rank()) cluster_sync(); else asm volatile("bar.sync 1, 64;");', "deadlock", "96 of 128"),
        ("__shared__ u32 s; out[0] = load_remote(map(addr(&s), 2));", "out-of-bounds", "rank 2 of a cluster of 2"),
    ],
)  # fmt: skip
def test_faults_of_clusters_are_named(body: str, kind: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message) as caught:
        run(body, 4, grid=2, block=64)
    assert caught.value.kind == kind


def test_exited_threads_are_not_waited_for() -> None:
    found = run("if (rank() == 1) return; cluster_sync(); if (t == 0) out[b] = 7;", 2, grid=2)
    assert found.tolist() == [7, 0]


@pytest.mark.parametrize(
    ("grid", "cluster", "message"),
    [(3, 2, "no multiple"), (32, 32, "up to 16"), ((4, 3), (2, 2), "no multiple")],
)
def test_clusters_that_cannot_be_launched_are_refused(grid: Any, cluster: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("out[0] = 1;", 1, grid=grid, cluster=cluster)


def test_the_shape_that_a_kernel_was_compiled_for_is_the_default() -> None:
    source = (
        HELPERS
        + """extern "C" __global__ void __cluster_dims__(4, 1, 1) k(u32 *out) {
      if (threadIdx.x == 0) out[blockIdx.x] = rank(); }"""
    )
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(8, np.uint32))
    module = gpu.load(compile_hopper(source))
    module.launch("k", 8, 32, 0, [out])
    assert gpu.to_host(out).tolist() == [0, 1, 2, 3] * 2
    with pytest.raises(ValueError, match="compiled for clusters of"):
        module.launch("k", 8, 32, 0, [out], cluster=2)


# mbarriers of other blocks, and copies to them --------------------------------------------------------------------

REMOTE_ARRIVAL = """__shared__ u64 bar; __shared__ u32 s[32];
    if (t == 0) { init(addr(&bar), 64); init_fence(); } cluster_sync();
    const u32 other = map(addr(&bar), rank() ^ 1);
    store_remote(map(addr(s), rank() ^ 1) + 4 * t, b * 32 + t);
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(other) : "memory");
    arrive(addr(&bar)); WAIT
    out[b * 32 + t] = s[t]; cluster_sync();"""


def test_arrivals_at_another_blocks_mbarrier() -> None:
    found = run(REMOTE_ARRIVAL.replace("WAIT", "wait(addr(&bar), 0);"), 128)
    assert found.tolist() == [(b ^ 1) * 32 + t for b in range(4) for t in range(32)]


def test_an_arrival_at_an_mbarrier_of_a_block_that_has_ended_is_out_of_bounds() -> None:
    body = """__shared__ u64 bar; if (t == 0) { init(addr(&bar), 1); init_fence(); } cluster_sync();
    if (rank() == 0) return;
    cluster_sync();
    if (t == 0) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(map(addr(&bar), 0)) : "memory");"""
    with pytest.raises(SimulationError, match="that has ended") as caught:
        run(body, 1, grid=2)
    assert caught.value.kind == "out-of-bounds"


MULTICAST = r"""__shared__ __align__(128) u32 s[128]; __shared__ u64 bar;
    if (t == 0) { init(addr(&bar), 1); init_fence(); expect(addr(&bar), 512); } cluster_sync();
    if (t == 0 && rank() == 0) {
      asm volatile("COPY.multicast::cluster [%0], SOURCE, [%1], %2;"
                   :: "r"(addr(s)), "r"(addr(&bar)), "h"((unsigned short)MASK), "l"(in), "l"(&source), "r"(0)
                   : "memory"); }
    WAIT
    for (u32 i = t; i < 128; i += 32) out[b * 128 + i] = s[i]; cluster_sync();"""
PLAIN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "[%3], 512"
TENSOR = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes", "[%4, {%5}]"


def run_multicast(copy: tuple[str, str], mask: int, wait: str = "wait(addr(&bar), 0);", cluster: int = 4) -> np.ndarray:
    gpu = SimulatedGPU("sm_90a")
    data = np.arange(128, dtype=np.uint32) + 1000
    address = gpu.to_device(data)
    tensor_map = TensorMap(address, data.dtype, (128,), (), (128,))
    opcode, source = copy
    body = MULTICAST.replace("COPY", opcode).replace("SOURCE", source).replace("MASK", str(mask)).replace("WAIT", wait)
    parameters = ", const u32 *in, const __grid_constant__ Map source"
    return run(body, 4 * 128, cluster=cluster, gpu=gpu, args=(address, tensor_map), parameters=parameters).reshape(
        4, 128
    )


@pytest.mark.parametrize("copy", [PLAIN, TENSOR], ids=["plain", "tensor"])
def test_a_multicast_copy_arrives_in_every_block_of_its_mask(copy: tuple[str, str]) -> None:
    found = run_multicast(copy, 0b1111)
    assert (found == np.arange(128) + 1000).all()


@pytest.mark.parametrize("copy", [PLAIN, TENSOR], ids=["plain", "tensor"])
def test_a_block_that_is_not_in_the_mask_waits_in_vain(copy: tuple[str, str]) -> None:
    with pytest.raises(SimulationError, match="512 bytes expected but not copied") as caught:
        run_multicast(copy, 0b0111)
    assert caught.value.kind == "deadlock"


def test_every_block_has_to_wait_for_a_multicast_copy() -> None:
    with pytest.raises(SimulationError) as caught:
        run_multicast(PLAIN, 0b1111, wait="if (rank() != 2) wait(addr(&bar), 0);")
    assert caught.value.kind in ("async-copy", "uninitialised-shared")


def test_a_mask_beyond_the_cluster_is_out_of_bounds() -> None:
    with pytest.raises(SimulationError, match="no thread block of the cluster"):
        run_multicast(PLAIN, 0b10001)


IN_CLUSTER = r"""__shared__ __align__(128) u32 s[128], r[128]; __shared__ u64 bar;
    for (u32 i = t; i < 128; i += 64) s[i] = b * 1000 + i, r[i] = 5;
    if (t == 0) { init(addr(&bar), 1); init_fence(); expect(addr(&bar), 512); }
    FENCE __syncthreads(); cluster_sync();
    if (t == 0) asm volatile("COPY [%0], [%1], 512, [%2];"
      :: "r"(map(addr(r), rank() ^ 1)), "r"(addr(s)), "r"(map(addr(&bar), rank() ^ 1)) : "memory");
    wait(addr(&bar), 0); for (u32 i = t; i < 128; i += 64) out[b * 128 + i] = r[i]; cluster_sync();"""


@pytest.mark.parametrize(
    ("copy", "added"),
    [
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", 0),
        ("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32", 5),
    ],
)
def test_bulk_copies_between_blocks(copy: str, added: int) -> None:
    found = run(IN_CLUSTER.replace("COPY", copy).replace("FENCE", "proxy_fence();"), 4 * 128, block=64)
    assert found.tolist() == [(b ^ 1) * 1000 + i + added for b in range(4) for i in range(128)]
    with pytest.raises(SimulationError) as caught:
        run(IN_CLUSTER.replace("COPY", copy).replace("FENCE", ""), 4 * 128, block=64)
    assert caught.value.kind == "proxy-fence"


ASYNC_STORE = r"""__shared__ __align__(16) u32 s[64]; __shared__ u64 bar;
    if (t == 0) { init(addr(&bar), 1); init_fence(); expect(addr(&bar), BYTES); } s[t] = s[t + 32] = 1; cluster_sync();
    asm volatile("STORE" :: "r"(map(addr(s), rank() ^ 1) + STEP * t), "r"(b * 32 + t), "r"(map(addr(&bar), rank() ^ 1))
                 : "memory");
    WAIT out[b * 64 + t] = s[t]; out[b * 64 + 32 + t] = s[t + 32]; cluster_sync();"""


@pytest.mark.parametrize(
    ("store", "step"),
    [
        ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];", 4),
        ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %1}, [%2];", 8),
        ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];", 4),
    ],
)
def test_asynchronous_stores_to_another_block(store: str, step: int) -> None:
    body = ASYNC_STORE.replace("STORE", store).replace("STEP", str(step)).replace("BYTES", str(32 * step))
    found = run(body.replace("WAIT", "wait(addr(&bar), 0);"), 4 * 64).reshape(4, 64)
    for block in range(4):
        sent = (block ^ 1) * 32 + np.arange(32)
        expected = np.repeat(sent, 2) if step == 8 else np.r_[sent + store.startswith("red"), np.ones(32)]
        assert found[block].tolist() == expected.tolist()
    with pytest.raises(SimulationError) as caught:
        run(body.replace("WAIT", ""), 4 * 64)
    assert caught.value.kind == "async-copy"


# Addresses: the rank is in bits 24 and up, also in the own block ---------------------------------------------------


def test_addresses_have_the_rank_of_their_block() -> None:
    body = """__shared__ u32 s[32]; extern __shared__ u32 more[]; s[t] = more[t] = t; cluster_sync();
    u32 r; asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(r) : "r"(addr(s)));
    u64 p; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"((u64)s), "r"(rank() ^ 1));
    if (t == 0) { out[6 * b] = addr(s); out[6 * b + 1] = addr(more); out[6 * b + 2] = map(addr(s), 0);
      out[6 * b + 3] = map(addr(s), 1); out[6 * b + 4] = (u32)p; out[6 * b + 5] = r; } cluster_sync();"""
    found = run(body, 24, shared_bytes=128).reshape(4, 6)
    offsets = found[0, :2]
    for block, row in enumerate(found):
        rank = block % 2
        own, other = offsets[0] + (rank << 24), offsets[0] + ((rank ^ 1) << 24)
        assert row.tolist() == [own, offsets[1] + (rank << 24), offsets[0], offsets[0] + (1 << 24), other, rank]


def test_addresses_without_a_cluster_have_no_rank() -> None:
    assert run("__shared__ u32 s[32]; s[t] = b; out[b] = addr(s) >> 24;", 4, cluster=1).tolist() == [0] * 4


def test_an_offset_alone_is_in_the_block_of_rank_0() -> None:
    body = """__shared__ u32 s[32]; s[t] = b; cluster_sync();
    out[b * 32 + t] = load_remote(addr(s) & 0xffffff); cluster_sync();"""
    assert run(body, 128).tolist() == [b // 2 * 2 for b in range(4) for _ in range(32)]


def test_isspacep_tells_the_own_block_from_others() -> None:
    body = """__shared__ u32 s[32]; s[t] = b; cluster_sync();
    u64 p; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(p) : "l"((u64)s), "r"(rank() ^ 1));
    u32 own, other, any;
    asm("{ .reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(own) : "l"(s));
    asm("{ .reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(other) : "l"(p));
    asm("{ .reg .pred p; isspacep.shared::cluster p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(any) : "l"(p));
    out[b] = own | other << 1 | any << 2; cluster_sync();"""
    assert run(body, 4).tolist() == [0b101] * 4


@pytest.mark.parametrize(
    ("statement", "access"),
    [
        ('asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(other) : "memory");', "shared load"),
        ('asm volatile("st.shared::cta.b32 [%1], %0;" :: "r"(v), "r"(other) : "memory");', "shared store"),
        ('asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(v) : "r"(other) : "memory");', "shared atomic"),
        (
            'asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(v) : "r"(other) : "memory");',
            "shared load",
        ),
        ('asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(other), "l"(out) : "memory");', "async-copy"),
        ("if (t == 0) init(other, 1);", "mbarrier"),
        ("if (t == 0) arrive(other);", "mbarrier"),
        (
            'if (t == 0) asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%1], [%0], 16;"'
            ' :: "r"(other), "l"(out) : "memory");',
            "bulk copy",
        ),
    ],
)
@pytest.mark.parametrize(
    ("other", "ranks"), [("map(addr(s), rank() ^ 1)", (1, 0)), ("addr(s) & 0xffffff", (0, 1))], ids=["mapped", "masked"]
)
def test_what_reaches_the_own_block_only_needs_its_addresses(
    statement: str, access: str, other: str, ranks: tuple[int, int]
) -> None:
    """On an H200, loads, stores, atomics, copies and arrivals like these are illegal instructions."""
    body = "__shared__ __align__(16) u64 s[32]; if (t == 0) init(addr(s), 1); cluster_sync(); u32 v = 0;"
    body += f"const u32 other = {other}; {statement} out[t] = v; cluster_sync();"
    message = f"{access} at a shared address of rank {ranks[0]} of the cluster; this thread block has rank {ranks[1]}"
    with pytest.raises(SimulationError, match=message) as caught:
        run(body, 128, check_hazards=False)
    assert caught.value.kind == "out-of-bounds"


@pytest.mark.parametrize("mask", [0x3FFFF, 0xFFFFFFFF])
def test_a_descriptor_of_an_unmasked_address_has_the_rank_in_its_leading_offset(mask: int) -> None:
    """16 bytes times 2⁴ for each rank, so that the block of rank 1 finds the second 8 columns in the wrong place."""
    image = np.random.default_rng(0).integers(-4, 5, 2048).astype(BF16)
    found = run_cluster_descriptors(image.view(np.uint16), mask)
    rows = np.arange(64)
    for rank in range(2):
        leading = 128 + (256 * rank if mask > 0x3FFFF else 0)
        starts = 256 * (rows // 8) + 16 * (rows % 8)
        places = (starts[:, None, None] + np.array([0, leading])[:, None] + 2 * np.arange(8)).reshape(64, 16) // 2
        a, b = image[places].astype(np.float32), image[1024 + places[:8]].astype(np.float32)
        np.testing.assert_array_equal(found[rank], a @ b.T)
