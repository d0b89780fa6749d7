"""Configs and their names: checked fields, C++ spellings, and what a writer probably meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from flashwright.problem.dtypes import DType

ConfigT = TypeVar("ConfigT")
"""A config of any kernel family."""

_CPP_CAST = re.compile(r"^\(\s*[\w:]+\s*\)\s*")
_MANGLED_LITERAL = re.compile(r"L(?:[a-z]|N\w+?E|\d+[A-Za-z_]+)(n?)(\d+)E")
"""A literal of a fundamental type, an enumeration in a namespace, or a plain one (Itanium C++ ABI, "Literals")."""
_CPP_SCOPE = re.compile(r"^(?:\w+::)+k?")


def check_field_types(config: Any, types: Iterable[tuple[str, Any]]) -> None:
    """Raises `ValueError` for a field of another type; truth values may be given as 0 and 1."""
    for name, kind in types:
        value = getattr(config, name)
        if kind == "bool":
            if value not in (0, 1):
                raise ValueError(f"{name}: {value!r} is not a truth value; allowed: True, False")
            object.__setattr__(config, name, bool(value))
        elif kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name}: {value!r} is not an integer")


def nearest_hint(text: str, known: Iterable[str]) -> str:
    """The end of an error message: what the writer probably meant, if anything is near enough."""
    nearest = get_close_matches(text, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def cpp_literal(value: DType | bool | int) -> str:
    if isinstance(value, DType):
        return value.to_cpp()
    return str(value).lower()


def parse_cpp_fields(config_type: Callable[..., ConfigT], initialiser: str, never_zero: int) -> ConfigT:
    """The config that a C++ aggregate initialiser holds, by the order of the fields; the first `never_zero` of them
    are there in any name. A mangled name may leave out trailing members that are zero (Itanium C++ ABI, "template
    arguments")."""
    known = fields(config_type)  # type: ignore[arg-type]
    texts = [text.strip() for text in initialiser.split(",")]
    if not never_zero <= len(texts) <= len(known):
        raise ValueError(
            f"{config_type.__name__}{{{initialiser}}} has {len(texts)} fields; "
            f"expected {never_zero} to {len(known)}: {', '.join(field.name for field in known)}"
        )
    values = [_parse_cpp_literal(field.name, text) for field, text in zip(known, texts, strict=False)]
    return config_type(*values, *[0] * (len(known) - len(values)))


def mangled_fields(config_type: type, text: str) -> str | None:
    """The members of a config in a mangled kernel name, as an initialiser holds them; None if it has no such config."""
    name = config_type.__name__
    match = re.search(rf"{len(name)}{name}E?((?:{_MANGLED_LITERAL.pattern})+)E", text)
    if match is None:
        return None
    return ", ".join(f"{'-' if minus else ''}{digits}" for minus, digits in _MANGLED_LITERAL.findall(match[1]))


def _parse_cpp_literal(name: str, text: str) -> DType | bool | int:
    bare = _CPP_CAST.sub("", text)
    if name == "dtype":
        bare = _CPP_SCOPE.sub("", bare)
        return DType.parse(int(bare) if bare.isdigit() else bare)
    if bare in ("true", "false"):
        return bare == "true"
    if re.fullmatch(r"-?\d+", bare):
        return int(bare)
    raise ValueError(f"{name}: {text!r} is not a number or truth value")
