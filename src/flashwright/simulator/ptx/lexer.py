"""PTX text to tokens."""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""[ \t\r]*(?:
      (?P<newline>\n)
    | (?P<location>\.loc\b[^\n;{}]*)
    | (?P<directive>\.[A-Za-z_][\w$]*(?:::\w+)*)
    | (?P<warp_size>WARP_SZ\b)
    | (?P<word>%?[A-Za-z_$][\w$]*(?:\.[\w$]+(?:::\w+)*)*)
    | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?)
    | (?P<punctuation>[{}\[\]();:,|!@+\-<>=*%~&^])
    | (?P<comment>//[^\n]*|/\*(?s:.*?)\*/)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<end>\Z)
    )""",
    re.VERBOSE,
)


class PtxSyntaxError(ValueError):
    """The text is not PTX this parser understands; the message names the line."""


class Token(NamedTuple):
    kind: str
    text: str
    line: int
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """All tokens of a module, without white space and comments, each with its line number (from 1).

    A ``.loc`` directive is one token of kind "location", the constant ``WARP_SZ`` a number; the last token is of
    kind "end".
    """
    tokens: list[Token] = []
    append = tokens.append
    match_at = _TOKEN.match
    line = 1
    position = 0
    while True:
        match = match_at(text, position)
        if match is None:
            raise PtxSyntaxError(f"PTX line {line}: unexpected character {text[position:].lstrip()[0]!r}")
        kind = match.lastgroup
        position = match.end()
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += match.group().count("\n")
        else:
            found = match.group(kind)  # type: ignore[arg-type]
            start = position - len(found)
            if kind == "warp_size":
                kind, found = "number", "32"
            append(Token(kind, found, line, start, position))  # type: ignore[arg-type]
            if kind == "end":
                return tokens
