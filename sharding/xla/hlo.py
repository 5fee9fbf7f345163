"""Parser of HLO text: computations, instructions and the user's source line of each.

The text is that of `compiled.as_text()`; for the grammar see XLA's parser:
https://github.com/openxla/xla/blob/main/xla/hlo/parser/hlo_parser.cc.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sharding.errors import ShardingError

# Other types are a letter and the bits, or for narrow floats the parts of JAX's name (f8e4m3fn is float8_e4m3fn).
_NAMES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_LETTERS = {"s": "int", "u": "uint", "c": "complex"}
_UNSIZED = ("token", "opaque")


class Array(NamedTuple):
    """The type of one array on one device."""

    dtype: str
    """JAX's name for it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes without layout padding."""
        return -(-math.prod(self.shape) * _bits(self.dtype) // 8)


Tree: TypeAlias = "Array | tuple[Tree, ...]"
"""The type of an instruction's result: an array or a nested tuple of arrays."""


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    """Names of instructions in the same computation."""
    literal: str
    """The text of the operands: a constant's value, a parameter's number."""
    attributes: str
    """The text behind the operands."""
    is_root: bool

    @property
    def result(self) -> Tree:
        """The type of the result."""
        return read_type(self.type_text)

    def attribute(self, pattern: str) -> str:
        """The first group of a regular expression in the attributes; empty if there is no match."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def op_name(self) -> str:
        """JAX's name stack of the op it comes from."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"')

    def called(self) -> Iterator[tuple[str, str]]:
        """(attribute, computation) of each computation that it calls."""
        own = self.attributes.partition(", metadata={")[0]
        if "=%" in own or "={%" in own:
            for key, names in _CALLED.findall(own):
                for name in _NAME.findall(names):
                    yield key, name


Computation: TypeAlias = "dict[str, Instruction]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An HLO module."""

    entry: str
    """The name of the entry computation."""
    computations: dict[str, Computation]
    num_devices: int
    """Partitions times replicas; 1 where the text has no header."""
    frames: dict[int, str]
    """`stack_frame_id` -> `file.py:line (function)`."""

    def root(self, computation: str) -> Instruction:
        """The root instruction of a computation."""
        lines = self.computations[computation].values()
        return next(line for line in reversed(lines) if line.is_root)

    def source(self, line: Instruction) -> str:
        """`file.py:line (function)` of the user's code for an instruction; empty where XLA kept none."""
        frame = line.attribute(r"stack_frame_id=(\d+)")
        if frame:
            return self.frames.get(int(frame), "")
        file, number = line.attribute(r'source_file="([^"]*)"'), line.attribute(r"source_line=(\d+)")
        return f"{os.path.basename(file)}:{number}" if file else ""


def read_module(text: str) -> Module:
    """Parse an HLO text. Raises ShardingError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is not None and line.startswith(" "):
            instruction = _instruction(line)
            if instruction:
                current[instruction.name] = instruction
        elif line.endswith("{") and (head := _COMPUTATION.match(line)):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
    if not entry:
        raise ShardingError(
            "collectives of a compiled program",
            found=f"{len(computations)} HLO computations, none an ENTRY",
            required="the HLO of a compiled program, with an ENTRY computation",
            fix="f.lower(...).compile()",
        )
    return Module(entry=entry, computations=computations, num_devices=_num_devices(text), frames=_frames(text))


def read_type(text: str) -> Tree:
    """Parse a type such as `(f32[8,4]{1,0}, u32[])`."""
    nested: list[list[Tree]] = [[]]
    for bracket, dtype, sizes in _TOKEN.findall(_LAYOUT.sub("", text)):
        if bracket == "(":
            nested.append([])
        elif bracket == ")":
            inner = tuple(nested.pop())
            nested[-1].append(inner)
        else:
            nested[-1].append(Array(_dtype(dtype), tuple(int(n) for n in _INTEGER.findall(sizes))))
    return nested[0][0]


def arrays(tree: Tree) -> Iterator[Array]:
    """All arrays of a type, in order."""
    if isinstance(tree, Array):
        yield tree
    else:
        for part in tree:
            yield from arrays(part)


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"^ +(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = "body|condition|calls|to_apply|branch_computations|true_computation|false_computation|called_computations"
_CALLED = re.compile(rf"\b({_CALLS})=(%[\w.\-]+|\{{[^}}]*\}})")
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")
_TOKEN = re.compile(r"([()])|(\w+)\[([^\]]*)\]")
_INTEGER = re.compile(r"\d+")
_BRACKET = re.compile(r"[()]")


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    start = head.end()
    type_end = _closing_bracket(line, start) if line[start] == "(" else line.index(" ", start)
    opened = line.index("(", type_end)
    closed = _closing_bracket(line, opened)
    literal = line[opened + 1 : closed - 1]
    return Instruction(
        name=head[2],
        opcode=line[type_end:opened].strip(),
        type_text=line[start:type_end],
        operands=tuple(_NAME.findall(literal)),
        literal=literal,
        attributes=line[closed:],
        is_root=head[1] is not None,
    )


def _closing_bracket(line: str, opened: int) -> int:
    """The position behind the bracket that closes the one at `opened`."""
    depth = 0
    for bracket in _BRACKET.finditer(line, opened):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(line)


def _dtype(name: str) -> str:
    if name in _NAMES or name in _UNSIZED:
        return _NAMES.get(name, name)
    integer = re.fullmatch(r"([suc])(\d+)", name)
    return _LETTERS[integer[1]] + integer[2] if integer else re.sub(r"f(\d+)", r"float\1_", name, count=1)


def _bits(dtype: str) -> int:
    if dtype in _UNSIZED:
        return 0
    return 8 if dtype == "bool" else int(_INTEGER.findall(dtype)[0])


def _num_devices(text: str) -> int:
    header = text.partition("\n")[0]
    return math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header))


def _frames(text: str) -> dict[int, str]:
    """The innermost location of each stack frame, from the tables above the computations."""
    tables = _tables(text)
    files, functions = (tables.get(name, {}) for name in ("FileNames", "FunctionNames"))
    places = {
        number: f"{os.path.basename(files[at['file_name_id']])}:{at['line']} ({functions[at['function_name_id']]})"
        for number, at in ((number, _fields(line)) for number, line in tables.get("FileLocations", {}).items())
    }
    frames = {number: _fields(line) for number, line in tables.get("StackFrames", {}).items()}
    return {number: places[at["file_location_id"]] for number, at in frames.items()}


def _tables(text: str) -> dict[str, dict[int, str]]:
    tables: dict[str, dict[int, str]] = {}
    for block in re.finditer(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", text, re.M):
        lines = (line.split(" ", 1) for line in block[2].splitlines())
        tables[block[1]] = {int(number): line.strip('"') for number, line in lines}
    return tables


def _fields(line: str) -> dict[str, int]:
    return {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", line)}
