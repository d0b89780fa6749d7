"""A config and a variant as CUDA source: the headers of the package, specialised by a generated one.

Device code reads the constants of four namespaces: `cfg` (the config's fields), `shape` and `layout` (what
`tile_shapes` derived from them) and `variant` (what is computed).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from flashwright.problem.dtypes import DType
from flashwright.problem.variant import AttentionVariant

if TYPE_CHECKING:
    from importlib.abc import Traversable

Constant = bool | int | DType
SPECIALISATION_HEADER = "specialisation.cuh"


@dataclass(frozen=True, repr=False)
class KernelSource:
    """All that a compiler needs: a translation unit, the headers it includes, and the kernel's C++ name."""

    text: str
    headers: tuple[tuple[str, str], ...]
    name_expression: str
    file_name: str
    options: tuple[str, ...] = ()
    """Compiler options that this source requires."""

    def __repr__(self) -> str:
        return f"<KernelSource {self.file_name}: {self.name_expression}, {len(self.headers)} headers>"

    def edited(self, header: str, old: str, new: str) -> KernelSource:
        """The same with some lines of a header replaced, to see what they are for.

        Raises `ValueError` unless the header has the old text exactly once.
        """
        headers = dict(self.headers)
        if header not in headers:
            raise ValueError(f"header: {header!r} is not known; allowed: {', '.join(headers)}")
        if (found := headers[header].count(old)) != 1:
            raise ValueError(f"{header} has the text {old!r} {found} times; an edit needs it once")
        headers[header] = headers[header].replace(old, new)
        return replace(self, headers=tuple(headers.items()))

    def digest(self) -> str:
        """A short hash of all that the compiler reads of it: headers that are not included are no part of it."""
        parts = "\0".join((self.flattened(), self.name_expression, *self.options))
        return hashlib.sha256(parts.encode()).hexdigest()[:16]

    def flattened(self) -> str:
        """The same as one file: every header in the place of its first `#include`."""
        headers = dict(self.headers)
        seen: set[str] = set()

        def expand(name: str, text: str) -> list[str]:
            lines = [f"// ---- {name}"]
            for line in text.splitlines():
                include = re.match(r'#include "(.+)"', line)
                if include is None:
                    lines += [] if line == "#pragma once" else [line]
                elif include[1] not in seen:
                    seen.add(include[1])
                    lines += expand(include[1], headers[include[1]])
            return lines

        return "\n".join(expand(self.file_name, self.text)) + "\n"


@cache
def device_headers() -> tuple[tuple[str, str], ...]:
    """The package's device code: (name as in `#include`, text), sorted by name."""
    return tuple(sorted(_headers_in(resources.files("flashwright") / "cuda")))


def _headers_in(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _headers_in(item, f"{path}{item.name}/")
        elif item.name.endswith(".cuh"):
            yield path + item.name, item.read_text("utf-8")


def variant_constants(variant: AttentionVariant) -> dict[str, Constant]:
    """As kernels have them whose tensors all have one head dimension."""
    constants = {field.name: getattr(variant, field.name) for field in fields(variant)}
    del constants["value_head_dim"]
    return constants | {"pads_columns": variant.pads_columns}


class Config(Protocol):
    """A family's config: a dataclass of constants."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def specialisation(config: Config, namespaces: dict[str, dict[str, Constant]]) -> str:
    """The generated header: the config's type, for the kernel's name, and what device code reads, by namespace."""
    members = " ".join(f"{_cpp_type(getattr(config, field.name))} {field.name};" for field in fields(config))
    lines = [
        f"// Generated for {config}",
        "#pragma once",
        f"enum class DType {{ {', '.join(f'{member.name} = {member.value}' for member in DType)} }};",
        f"struct {type(config).__name__} {{ {members} }};",
    ]
    for name, constants in namespaces.items():
        lines.append(f"namespace {name} {{")
        lines += [f"constexpr {_cpp_type(v)} {k} = {_cpp_literal(v)};" for k, v in constants.items()]
        lines.append("}")
    return "\n".join(lines) + "\n"


def _cpp_type(value: Constant) -> str:
    return "DType" if isinstance(value, DType) else type(value).__name__


def _cpp_literal(value: Constant) -> str:
    return value.to_cpp() if isinstance(value, DType) else str(value).lower()
