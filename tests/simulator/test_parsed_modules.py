"""Parsed modules on disk: the same tree, in concurrent processes too; what is damaged or untrusted is parsed anew."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.simulator import SimulatedGPU, parsed_modules
from flashwright.simulator.parsed_modules import SyntaxStore, parsed
from flashwright.simulator.ptx.parser import parse

PTX = (Path(__file__).parent / "data" / "triton_matmul.ptx").read_text()


class Parser:
    """Counts the texts that were really parsed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, text: str) -> object:
        self.calls += 1
        return parse(text)


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parser:
    """A cache of the test's own, and a parser that counts."""
    counting = Parser()
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(parsed_modules.parser, "parse", counting)
    monkeypatch.setattr(parsed_modules, "_MIN_CHARACTERS", 1000)
    parsed.cache_clear()
    yield counting
    parsed.cache_clear()


def load_again() -> object:
    """As another process would."""
    parsed.cache_clear()
    return parsed(PTX)


def entries(directory: Path) -> list[Path]:
    return sorted((directory / "cache" / "simulator").iterdir())


def test_a_module_is_parsed_once_and_read_back_as_it_was(parser: Parser) -> None:
    assert load_again() == load_again() == parse(PTX)
    assert parser.calls == 1


def test_loading_twice_in_a_process_parses_once(parser: Parser) -> None:
    for _ in range(2):
        SimulatedGPU("sm_90").load(PTX)
    assert parser.calls == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + b"more",
        lambda data: os.urandom(len(data)),
    ],
    ids=["empty", "cut short", "one bit", "longer", "random"],
)
def test_a_damaged_entry_is_rebuilt(parser: Parser, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    expected = load_again()
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    assert load_again() == expected and parser.calls == 2
    assert load_again() == expected and parser.calls == 2


class Intruder:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, ("true",))


def test_an_entry_that_holds_anything_else_than_a_syntax_tree_is_not_executed(
    parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_again()
    (entry,) = entries(tmp_path)
    content = pickle.dumps(Intruder())
    header = parsed_modules._MAGIC + parsed_modules.hashlib.sha256(content).digest()
    entry.write_bytes(header + content)
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("executed"))
    load_again()
    assert parser.calls == 2


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions as on POSIX")
def test_a_directory_that_others_can_write_to_is_not_read(parser: Parser, tmp_path: Path) -> None:
    load_again()
    (tmp_path / "cache").chmod(0o755)
    (tmp_path / "cache" / "simulator").chmod(0o777)
    load_again()
    assert parser.calls == 2


def test_an_unusable_directory_is_no_failure(parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIRECTORY_VARIABLE, str(tmp_path / "file" / "cache"))
    assert load_again() == parse(PTX)


def test_the_eldest_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SyntaxStore(tmp_path)
    tree = parse(PTX)
    store.put("first", tree)
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(parsed_modules, "MAX_CACHE_BYTES", 2 * size)
    store.put("second", tree)
    for age, key in enumerate(("second", "first")):  # the first one was used last
        os.utime(tmp_path / f"{key}.ptx-syntax", (time.time() - 100 + age,) * 2)
    store.put("third", tree)
    assert [store.get(key) is not None for key in ("first", "second", "third")] == [True, False, True]


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="starts processes by fork")
def test_processes_that_load_the_same_module_at_once_agree(parser: Parser, tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        trees = pool.map(parsed, [PTX] * 8, chunksize=1)
    assert trees == [parse(PTX)] * 8
    assert [path.suffix for path in entries(tmp_path)] == [".ptx-syntax"]
