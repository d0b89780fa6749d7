"""Tokens to syntax tree: a recursive-descent parser of the PTX that NVRTC, nvcc and Triton emit."""

from __future__ import annotations

import re
import struct
from typing import Any

from .lexer import PtxSyntaxError, Token, tokenize
from .syntax import (
    Address,
    Arguments,
    Function,
    Guard,
    Immediate,
    Instruction,
    Label,
    ModuleSyntax,
    Not,
    Operand,
    Pair,
    Register,
    Sink,
    SourceLocation,
    Symbol,
    Variable,
    Vector,
)
from .types import TYPES, PtxType

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SPACES = {".reg", ".shared", ".local", ".const", ".global", ".param"}
_LIMITS = {
    ".maxntid",
    ".reqntid",
    ".minnctapersm",
    ".maxnctapersm",
    ".maxnreg",
    ".reqnctapercluster",
    ".maxclusterrank",
}
# Variables that name a texture, a sampler or a surface: no instruction that uses them is executed.
_HANDLES = (".texref", ".samplerref", ".surfref")
_DEBUG_SECTION = re.compile(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", re.MULTILINE)
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_Place = tuple[Any, ...]  # file, line, column


def parse(text: str) -> ModuleSyntax:
    """The syntax tree of a PTX module; PtxSyntaxError names the line of what is not understood."""
    # Debug sections hold bytes for a debugger, no code: blank them, keeping line numbers.
    text = _DEBUG_SECTION.sub(lambda match: "\n" * match.group().count("\n"), text)
    files = {int(index): name for index, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
    return _Parser(text, files).module()


class _Scope:
    """Names declared between one pair of braces; an inner scope's names are made unique by a suffix."""

    def __init__(self, suffix: str, labels: set[str]) -> None:
        self.suffix = suffix
        self.registers: set[str] = set()
        self.symbols: set[str] = set(labels)


class _Parser:
    def __init__(self, text: str, files: dict[int, str]) -> None:
        self.text = text
        self.files = files
        self.tokens = tokenize(text)
        self.position = 0
        self.result = ModuleSyntax()
        self.scopes: list[_Scope] = []
        self.scopes_opened = 0
        self.location: SourceLocation | None = None
        self.known_locations: dict[_Place, SourceLocation] = {}

    # Token access ------------------------------------------------------------------------------------

    def peek(self) -> Token:
        return self.tokens[self.position]

    def next(self) -> Token:
        token = self.tokens[self.position]
        if token.kind == "end":
            raise self.error("unexpected end of the PTX text", token)
        self.position += 1
        return token

    def accept(self, text: str) -> bool:
        if self.tokens[self.position].text == text:
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        token = self.next()
        if token.text != text:
            raise self.error(f"expected {text!r}, found {token.text!r}", token)
        return token

    def error(self, message: str, token: Token | None = None) -> PtxSyntaxError:
        line = (token or self.peek()).line
        lines = self.text.splitlines()
        shown = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return PtxSyntaxError(f"PTX line {line}: {message} in `{shown}`")

    def skip_line(self) -> None:
        line = self.peek().line
        while self.peek().line == line and self.peek().kind != "end":
            self.position += 1

    # Module level ------------------------------------------------------------------------------------

    def module(self) -> ModuleSyntax:
        while self.peek().kind != "end":
            self.module_item()
        return self.result

    def module_item(self) -> None:
        token = self.peek()
        text = token.text
        if text == ".version":
            self.next()
            self.result.version = self.next().text
        elif text == ".target":
            self.next()
            self.result.target = self.next().text
            while self.accept(","):
                self.next()
        elif text in (".address_size", ".file") or token.kind == "location":
            self.skip_line()
        elif text in (".pragma", ".alias"):
            while self.next().text != ";":
                pass
        elif text in _LINKAGE or text in (".entry", ".func") or text in _SPACES:
            self.linked_item()
        else:
            raise self.error(f"unexpected {text!r} at module level", token)

    def linked_item(self) -> None:
        linkage = set()
        while self.peek().text in _LINKAGE:
            linkage.add(self.next().text)
        if self.peek().text in (".entry", ".func"):
            self.function()
            return
        for variable in self.declaration(is_extern=".extern" in linkage):
            self.result.variables.append(variable)

    def function(self) -> None:
        is_entry = self.next().text == ".entry"
        self.accept(".noreturn")
        returns = self.parameter_list() if self.peek().text == "(" else []
        name = self.next().text
        parameters = self.parameter_list() if self.peek().text == "(" else []
        function = Function(name, is_entry, returns, parameters)
        while self.peek().text not in ("{", ";"):
            directive = self.next().text
            if directive in _LIMITS:
                values = [self.integer()]
                while self.accept(","):
                    values.append(self.integer())
                function.limits[directive[1:]] = tuple(values)
            elif directive == ".pragma":
                while self.next().text != ";":
                    pass
            elif directive not in (".noreturn", ".explicitcluster", ".abi_preserve", ".blocksareclusters"):
                raise self.error(f"unexpected {directive!r} before the body of {name}")
        if self.accept(";"):
            self.result.functions.setdefault(name, function)  # a prototype
            return
        function.body = []
        self.location = None
        self.known_locations = {}
        self.scopes = []
        self.block(function)
        self.result.functions[name] = function

    def parameter_list(self) -> list[Variable]:
        self.expect("(")
        parameters: list[Variable] = []
        while not self.accept(")"):
            parameters += self.declaration(is_extern=False, terminated=False)
            self.accept(",")
        return parameters

    # Declarations ------------------------------------------------------------------------------------

    def integer(self) -> int:
        negative = self.accept("-")
        token = self.next()
        try:
            value = int(token.text.rstrip("U"), 0)
        except ValueError:
            raise self.error(f"expected an integer, found {token.text!r}", token) from None
        return -value if negative else value

    def declaration(self, is_extern: bool, terminated: bool = True) -> list[Variable]:
        """``.space .align n .type name[size] = {…}, …;`` for every space but ``.reg``."""
        space = self.next().text[1:].split("::")[0]
        align = 0
        element: PtxType | None = None
        count = 1
        while self.peek().kind == "directive":
            directive = self.next().text
            if directive == ".align":
                value = self.integer()
                align = align or value
            elif directive[1:] in TYPES:
                element = TYPES[directive[1:]]
            elif directive in _HANDLES:
                element = TYPES["u64"]
            elif directive in (".v2", ".v4"):
                count = int(directive[2:])
            elif directive == ".ptr":
                align = 0
                while self.peek().text in (".global", ".shared", ".const", ".local", ".align"):
                    if self.next().text == ".align":
                        self.integer()  # alignment of what the pointer points at
                align = -1
            elif directive not in (".attribute", ".managed", ".unified"):
                raise self.error(f"unsupported {directive!r} in a declaration")
        if element is None:
            raise self.error("declaration without a type")
        variables = []
        while True:
            variables.append(self.declarator(space, element, count, align, is_extern))
            if not (terminated and self.accept(",")):
                break
        if terminated:
            self.expect(";")
        return variables

    def declarator(self, space: str, element: PtxType, count: int, align: int, is_extern: bool) -> Variable:
        name = self.next().text
        size = element.bytes * count
        while self.accept("["):
            size = 0 if self.peek().text == "]" else size * self.integer()
            self.expect("]")
        initial: bytes | None = None
        pointers: list[tuple[int, str, int, bool]] = []
        if self.accept("="):
            data = bytearray()
            self.initialiser(element, data, pointers)
            size = size or len(data)
            initial = bytes(data.ljust(size, b"\0"))
        natural = element.bytes * count
        return Variable(
            name,
            space,
            element,
            max(align, natural) if align >= 0 else natural,
            size,
            initial,
            tuple(pointers),
            is_extern,
        )

    def initialiser(self, element: PtxType, data: bytearray, pointers: list[tuple[int, str, int, bool]]) -> None:
        if self.accept("{"):
            while not self.accept("}"):
                self.initialiser(element, data, pointers)
                self.accept(",")
            return
        token = self.peek()
        if token.kind == "word":  # an address: name+4, generic(name)+4
            self.next()
            generic = token.text == "generic"
            name = token.text
            if generic:
                self.expect("(")
                name = self.next().text
                self.expect(")")
            addend = self.integer() if self.accept("+") else 0
            pointers.append((len(data), name, addend, generic))
            data += bytes(element.bytes)
            return
        value = self.literal()
        if value.bits is not None:
            data += value.bits.to_bytes(element.bytes, "little")
        elif element.kind == "f":
            data += struct.pack({16: "<e", 32: "<f", 64: "<d"}[element.bits], value.value)
        else:
            data += (int(value.value) & ((1 << element.bits) - 1)).to_bytes(element.bytes, "little")

    def register_declaration(self, function: Function) -> None:
        self.expect(".reg")
        element: PtxType | None = None
        while self.peek().kind == "directive":
            token = self.next()
            if token.text[1:] not in TYPES:
                reason = f"registers of type {token.text}"
                function.unsupported.append((token.line, f".reg {token.text}", reason))
            element = TYPES.get(token.text[1:], TYPES["b32"])
        if element is None:
            raise self.error("register declaration without a type")
        scope = self.scopes[-1]
        while True:
            name = self.next().text
            names = [name]
            if self.accept("<"):
                names = [f"{name}{index}" for index in range(self.integer())]
                self.expect(">")
            scope.registers.update(names)
            function.registers.update((register + scope.suffix, element) for register in names)
            if not self.accept(","):
                break
        self.expect(";")

    # Function bodies ---------------------------------------------------------------------------------

    def labels_of_block(self) -> set[str]:
        """Labels of the block that starts here (after its brace), not of blocks inside it."""
        labels = set()
        depth = 1
        index = self.position
        while depth:
            token = self.tokens[index]
            if token.kind == "end":
                raise self.error("the text ends inside a block", token)
            if token.text == "{":
                depth += 1
            elif token.text == "}":
                depth -= 1
            elif depth == 1 and token.text == ":":
                labels.add(self.tokens[index - 1].text)
            index += 1
        return labels

    def block(self, function: Function) -> None:
        self.expect("{")
        # Names of a nested block get a suffix, so that two inline-assembly blocks may use the same ones.
        suffix = f"@{self.scopes_opened}" if self.scopes else ""
        self.scopes_opened += 1
        self.scopes.append(_Scope(suffix, self.labels_of_block()))
        while not self.accept("}"):
            self.statement(function)
        self.scopes.pop()

    def statement(self, function: Function) -> None:
        token = self.peek()
        text = token.text
        assert function.body is not None
        if text == "{":
            self.block(function)
        elif text == ".reg":
            self.register_declaration(function)
        elif token.kind == "location":
            self.source_location(self.next().text)
        elif text in _SPACES:
            scope = self.scopes[-1]
            for variable in self.declaration(is_extern=False):
                scope.symbols.add(variable.name)
                renamed = Variable(
                    variable.name + scope.suffix,
                    variable.space,
                    variable.type,
                    variable.align,
                    variable.size,
                    variable.initial,
                    variable.pointers,
                )
                function.variables.append(renamed)
        elif text in (".pragma", ".file"):
            while self.next().text != ";" and text == ".pragma":
                pass
            if text == ".file":
                self.skip_line()
        elif token.kind == "word" and self.tokens[self.position + 1].text == ":":
            self.label(function)
        elif text == ";":
            self.next()
        elif token.kind == "word" or text == "@":
            function.body.append(self.instruction())
        else:
            raise self.error(f"unexpected {text!r} in a function body", token)

    def label(self, function: Function) -> None:
        assert function.body is not None
        name = self.symbol_name(self.next().text)
        self.expect(":")
        directive = self.peek().text
        if directive in (".branchtargets", ".calltargets"):
            self.next()
            targets = [self.symbol_name(self.next().text)]
            while self.accept(","):
                targets.append(self.symbol_name(self.next().text))
            self.expect(";")
            named = function.branch_targets if directive == ".branchtargets" else function.call_targets
            named[name] = targets
        elif directive == ".callprototype":
            while self.next().text != ";":
                pass
        else:
            function.body.append(Label(name))

    def source_location(self, directive: str) -> None:
        """``.loc file line column [, function_name label, inlined_at file line column]``."""
        match = _LOCATION.match(directive)
        if match is None:
            raise self.error("a .loc directive this parser does not know", self.tokens[self.position - 1])
        file, line, column, *site = (None if part is None else int(part) for part in match.groups())
        call_site = None
        if site[0] is not None:
            # The call site's own .loc comes first, and says where it was itself inlined.
            call_site = self.known_locations.get(tuple(site)) or self.location_of(tuple(site), None)
        key = (file, line, column)
        self.location = self.location_of(key, call_site) if line else None
        if self.location is not None:
            self.known_locations[key] = self.location

    def location_of(self, key: _Place, call_site: SourceLocation | None) -> SourceLocation:
        file, line, column = key
        return SourceLocation(self.files.get(file, f"file {file}"), line, column, call_site)

    # Instructions ------------------------------------------------------------------------------------

    def register_name(self, name: str) -> str | None:
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return name + scope.suffix
        return name if name.startswith("%") else None

    def symbol_name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope.symbols:
                return name + scope.suffix
        return name

    def instruction(self) -> Instruction:
        start = self.peek()
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            guard = Guard(self.register(), negated)
        opcode = self.next()
        operands: list[Operand] = []
        while self.peek().text != ";":
            operands.append(self.operand())
            if not self.accept(","):
                break
        end = self.expect(";")
        text = " ".join(self.text[start.start : end.start].split())
        return Instruction(opcode.text, tuple(operands), guard, start.line, text, self.location)

    def register(self) -> Register:
        token = self.next()
        name = self.register_name(token.text)
        if name is None:
            raise self.error(f"{token.text!r} is not a register", token)
        return Register(name)

    def operand(self) -> Operand:
        first = self.simple_operand()
        if self.accept("|"):
            return Pair(first, self.simple_operand())
        return first

    def simple_operand(self) -> Operand:
        token = self.peek()
        if token.text == "[":
            return self.address()
        if token.text == "{":
            return Vector(self.operand_list("{", "}"))
        if token.text == "(":
            return Arguments(self.operand_list("(", ")"))
        if token.text == "!":
            self.next()
            return Not(self.register())
        if token.kind == "number" or token.text == "-":
            return self.literal()
        if token.kind != "word":
            raise self.error(f"unexpected operand {token.text!r}", token)
        self.next()
        if token.text == "_":
            return Sink()
        name = self.register_name(token.text)
        if name is not None:
            return Register(name)
        if token.text in ("generic",) and self.accept("("):
            symbol = Symbol(self.symbol_name(self.next().text))
            self.expect(")")
            return symbol
        offset = 0
        if self.peek().text in ("+", "-"):
            offset = self.offset()
        return Symbol(self.symbol_name(token.text), offset)

    def operand_list(self, opening: str, closing: str) -> tuple[Operand, ...]:
        self.expect(opening)
        elements: list[Operand] = []
        while not self.accept(closing):
            elements.append(self.operand())
            self.accept(",")
        return tuple(elements)

    def offset(self) -> int:
        total = 0
        while self.peek().text in ("+", "-"):
            sign = -1 if self.next().text == "-" else 1
            total += sign * self.integer()
        return total

    def address(self) -> Address | Vector:
        """``[base]``, ``[base+8]``, ``[base+-8]``, ``[16]``; ``[map, {…}]`` comes back as a Vector."""
        self.expect("[")
        parts: list[Operand] = []
        while True:
            parts.append(self.address_part())
            if not self.accept(","):
                break
        self.expect("]")
        if len(parts) == 1:
            assert isinstance(parts[0], Address)
            return parts[0]
        return Vector(tuple(parts))

    def address_part(self) -> Operand:
        token = self.peek()
        if token.text == "{":
            return Vector(self.operand_list("{", "}"))
        if token.kind == "number":
            return Address(Immediate(self.integer()), self.offset())
        self.next()
        name = self.register_name(token.text)
        base = Register(name) if name is not None else Symbol(self.symbol_name(token.text))
        return Address(base, self.offset())

    def literal(self) -> Immediate:
        negative = self.accept("-")
        token = self.next()
        text = token.text
        if token.kind != "number":
            raise self.error(f"expected a number, found {text!r}", token)
        if text[:2] in ("0f", "0F"):
            bits = int(text[2:], 16) ^ (0x80000000 if negative else 0)
            return Immediate(struct.unpack("<f", bits.to_bytes(4, "little"))[0], bits, 32)
        if text[:2] in ("0d", "0D"):
            bits = int(text[2:], 16) ^ (1 << 63 if negative else 0)
            return Immediate(struct.unpack("<d", bits.to_bytes(8, "little"))[0], bits, 64)
        value = float(text) if "." in text else _integer_literal(text)
        return Immediate(-value if negative else value)


def _integer_literal(text: str) -> int:
    text = text.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text[1] not in "xX":
        return int(text, 8)
    return int(text, 0)
