"""The order of loads and products in PTX and in the machine code for several architectures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.runtime.compiling import compile_kernel
from flashwright.workbench.explain.disassembly import DisassemblyError, disassemble
from flashwright.workbench.explain.explanations import explanation_of, loop_kinds_of
from flashwright.workbench.explain.loop import ptx_loop, sass_loop
from flashwright.workbench.explain.order import CodeOrder, LoadOrder, ptx_order, sass_order


def order_architectures(config: KernelConfig, arch: str) -> tuple[str, ...]:
    """That architecture, and those that the ladder of the config's family is compiled for."""
    ladder = family_of(config).ladder
    return tuple(dict.fromkeys((arch, *(ladder.architectures if ladder else ()))))


def code_orders(
    kernel: Kernel[Any], architectures: Sequence[str], turning: Collection[str] | None = None
) -> tuple[CodeOrder, ...]:
    """PTX first; then, for each architecture, machine code, also with each of the assembler's knobs turned.

    `turning` names those that are; by default, all.
    Nothing for a kernel that loads nothing by `ldmatrix`; only PTX where there is no disassembler. Machine code in
    which the loop is not found is left out.
    """
    in_ptx = ptx_order(ptx_loop(kernel.ptx, kernel.name, loop_kinds_of(kernel.config)))
    if in_ptx is None:
        return ()
    try:
        in_machine_code = tuple(_machine_code_orders(kernel, architectures, turning))
    except DisassemblyError:  # the facts about the loop quote it
        in_machine_code = ()
    return (CodeOrder("PTX", False, in_ptx), *in_machine_code)


def _machine_code_orders(
    own: Kernel[Any], architectures: Sequence[str], turning: Collection[str] | None
) -> Iterator[CodeOrder]:
    config = own.config
    turned: dict[str, KernelConfig] = {"": config}
    for knob in explanation_of(config).assembler_knobs:
        if turning is not None and knob not in turning:
            continue
        value = not getattr(config, knob)
        turned[f", {knob} {'on' if value else 'off'}"] = replace(config, **{knob: value})
    for arch in architectures:
        for label, each in turned.items():
            kernel = compile_kernel(each, arch, own.variant)
            try:
                order = machine_code_order(kernel)
            except ValueError:  # the facts about the loop quote it
                continue
            if order is not None:
                yield CodeOrder(f"{arch}{label}", True, order)


def machine_code_order(kernel: Kernel[Any]) -> LoadOrder | None:
    """Raises `DisassemblyError` where there is no disassembler, `ValueError` where the listing has no such loop."""
    return sass_order(sass_loop(disassemble(kernel.cubin), loop_kinds_of(kernel.config)))
