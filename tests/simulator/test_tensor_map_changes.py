"""tensormap.replace: kernels that change or build tensor maps."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.hardware.tensor_map import Fill, Swizzle, TensorMap
from flashwright.simulator import SimulatedGPU, SimulationError
from flashwright.simulator.tensor_maps import TensorMaps, decoded

from .hopper_tools import HEADER_90A

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "tensor_map",
    [
        TensorMap(4096, BF16, (64, 24), (128,), (64, 16), swizzle=Swizzle.B128),
        TensorMap(1 << 40, np.dtype(np.float32), (2**32, 3, 5), (256, 1024), (8, 1, 2), (1, 2, 1), fill=Fill.NAN),
        TensorMap(16, np.dtype(np.uint8), (32,), (), (32,)),
        TensorMap(16, np.dtype(np.int64), (4, 5, 6, 7, 8), (32, 160, 960, 6720), (4, 2, 1, 1, 3), swizzle=Swizzle.B32),
    ],
)
def test_a_tensor_map_is_what_its_bytes_say(tensor_map: TensorMap) -> None:
    content = TensorMaps().encode(tensor_map)
    assert len(content) == 128 and decoded(content) == tensor_map


# Makes or changes a tensor map in shared memory, copies it to global memory, and loads a box of 16 rows by it.
KERNEL = """
.visible .entry k(.param .u64 out, .param .u64 workspace, .param .u64 tensor, .param .align 64 .b8 map[128]) {
.shared .align 1024 .b8 box[2048]; .shared .align 128 .b8 scratch[128]; .shared .align 8 .b64 bar;
.reg .b64 %out, %ws, %tensor, %x<2>; .reg .b32 %t, %b, %s, %bx, %sp, %c<2>, %v<4>; .reg .pred %first, %done;
ld.param.u64 %out, [out]; ld.param.u64 %ws, [workspace]; ld.param.u64 %tensor, [tensor];
mov.u32 %t, %tid.x; mov.u32 %b, bar; mov.u32 %s, scratch; mov.u32 %bx, box; setp.eq.u32 %first, %t, 0;
mad.lo.u32 %sp, %t, 4, %s;
START
bar.warp.sync 0xffffffff;
CHANGES
bar.warp.sync 0xffffffff;
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%ws], [%s], 128;
fence.proxy.tensormap::generic.acquire.gpu [%ws], 128;
@%first mbarrier.init.shared::cta.b64 [%b], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;
mov.u32 %c0, 0; mov.u32 %c1, 8;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 2048;
@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%bx], [%ws, {%c0, %c1}], [%b];
AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %done, [%b], 0; @!%done bra AGAIN;
mad.lo.u32 %bx, %t, 64, %bx; mad.wide.u32 %out, %t, 64, %out;
COPIES
ret; }
"""
COPIES = "\n".join(
    f"ld.shared.v4.b32 {{%v0, %v1, %v2, %v3}}, [%bx+{at}]; st.global.v4.b32 [%out+{at}], {{%v0, %v1, %v2, %v3}};"
    for at in range(0, 64, 16)
)
ZEROS = "mov.b32 %v0, 0; st.shared.b32 [%sp], %v0;"
FROM_PARAMETER = """mov.b64 %x0, map; cvta.param.u64 %x0, %x0; mul.wide.u32 %x1, %t, 4; add.u64 %x0, %x0, %x1;
ld.b32 %v0, [%x0]; st.shared.b32 [%sp], %v0;"""


def replace(field: str, *operands: str, kind: str = "b32") -> str:
    return f"@%first tensormap.replace.tile.{field}.shared::cta.b1024.{kind} [%s], {', '.join(operands)};"


def run(start: str, changes: list[str], tensor: np.ndarray, tensor_map: Any = None) -> np.ndarray:
    gpu = SimulatedGPU("sm_90a")
    text = KERNEL.replace("START", start).replace("CHANGES", "\n".join(changes)).replace("COPIES", COPIES)
    out, workspace = gpu.to_device(np.zeros(2048, np.uint8)), gpu.allocate(128)
    address = gpu.to_device(tensor)
    argument = bytes(128) if tensor_map is None else tensor_map
    gpu.load(HEADER_90A + text).launch("k", 1, 32, 0, [out, workspace, address, argument])
    return gpu.to_host(out)


TENSOR = np.arange(40 * 64, dtype=np.uint16).reshape(40, 64)
ADDRESS = replace("global_address", "%tensor", kind="b64")
BUILD = [
    ADDRESS,
    replace("rank", "1"),
    "mov.u32 %v0, 64; mov.u32 %v1, 16; mov.u32 %v2, 40; mov.u32 %v3, 1; mov.b64 %x0, 128;",
    replace("box_dim", "0", "%v0"),
    replace("box_dim", "1", "%v1"),
    replace("global_dim", "0", "%v0"),
    replace("global_dim", "1", "%v2"),
    replace("global_stride", "0", "%x0", kind="b64"),
    replace("element_stride", "0", "%v3"),
    replace("element_stride", "1", "%v3"),
    replace("elemtype", "10"),
    replace("interleave_layout", "0"),
    replace("swizzle_mode", "0"),
    replace("fill_mode", "0"),
]


def test_a_tensor_map_is_built_from_zeros() -> None:
    """As Triton's descriptors made on the device are."""
    assert (run(ZEROS, BUILD, TENSOR).view(np.uint16) == TENSOR[8:24].ravel()).all()


def test_the_address_and_the_sizes_of_a_tensor_map_are_changed() -> None:
    """As grouped products do for each group."""
    elsewhere = TensorMap(4096, BF16, (64, 1000), (256,), (64, 16))
    changes = [
        ADDRESS,
        "mov.u32 %v2, 20; mov.b64 %x0, 128;",
        replace("global_dim", "1", "%v2"),
        replace("global_stride", "0", "%x0", kind="b64"),
    ]
    found = run(FROM_PARAMETER, changes, TENSOR, elsewhere).view(np.uint16).reshape(16, 64)
    assert (found[:12] == TENSOR[8:20]).all()
    assert not found[12:].any()  # beyond the twenty rows


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        (ZEROS, [*BUILD, replace("swizzle_mode", "7")], "swizzle_mode 7; allowed: 0 to 3"),
        (ZEROS, [*BUILD, replace("box_dim", "5", "%v0")], "box_dim has no number 5; allowed: 0 to 4"),
        (ZEROS, [*BUILD, "mov.b64 %x0, 100;", replace("global_stride", "0", "%x0", kind="b64")], "multiple of 16"),
        (ZEROS, BUILD[1:5], "is not allowed|must be"),
        (ZEROS, [*BUILD, replace("elemtype", "12")], "elemtype 12 is not modelled"),
        ("st.shared.b32 [%sp], %t;", BUILD[:1], "there is no tensor map at this address, and no 128 zeros"),
    ],
)
def test_what_is_no_tensor_map_is_named(start: str, changes: list[str], message: str) -> None:
    with pytest.raises(SimulationError, match=message) as caught:
        run(start, changes, TENSOR)
    assert caught.value.kind == "tensor-map"
