"""Kernels by the names that their authors gave them."""

from __future__ import annotations

import pytest

from flashwright.simulator.kernel_names import find_kernel, plain_name


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("saxpy", "saxpy"),
        ("_Z5saxpyfPKfPfi", "saxpy"),
        ("_ZN2ns5inner1kEPi", "ns::inner::k"),
        ("_Z4fillILi7EEvPf", "fill"),
        ("_ZL6hiddenPi", "hidden"),
        ("_Z", "_Z"),
    ],
)
def test_a_symbol_has_a_plain_name(symbol: str, name: str) -> None:
    assert plain_name(symbol) == name


def test_a_kernel_is_found_by_symbol_by_name_and_without_one_if_it_is_alone() -> None:
    kernels = ["_Z5saxpyfPKfPfi", "_ZN2ns1kEPi"]
    assert find_kernel(kernels, "saxpy") == find_kernel(kernels, kernels[0]) == find_kernel(kernels[:1], None)
    assert find_kernel(kernels, "k") == find_kernel(kernels, "ns::k") == kernels[1]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (None, "there are 3 kernels; choose one of: f, g"),
        ("h", "there is no 'h'; there is: f, g"),
        ("f", "'f' is overloaded or a template; choose one of: _Z1fi, _Z1ff"),
    ],
)
def test_what_is_not_one_kernel_is_explained(wanted: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_kernel(["_Z1fi", "_Z1ff", "_Z1gv"], wanted)
