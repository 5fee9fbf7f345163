"""Mutants: every small change of an expression that a table of replacements allows."""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = ("sharding", "models", "launch")

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
"""Operator -> the one that takes its place."""

FUNCTIONS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "reversed": "list",
    "union": "intersection",
    "issubset": "issuperset",
}
"""Name of a function or method -> the one that takes its place."""


UNSEEN = frozenset({"compare", "eq", "frozen", "kw_only", "maxsize", "repr", "slots", "stacklevel", "strict"})
"""Options of dataclasses, caches, warnings and `zip`, which only matter to a program with another fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    """Relative to the root, such as `sharding/spec.py`."""
    lines: range
    """Of the changed expression."""
    statement: range
    """Of the innermost statement around it."""
    at_import: bool
    """Whether it is executed when the file is imported."""
    source: str
    """The changed file."""
    change: str
    """The changed line, before and after."""

    @property
    def line(self) -> int:
        return self.lines.start

    @property
    def room(self) -> str:
        """The first two folders, such as `sharding/cost`; a file directly in one is its own room."""
        return "/".join(self.path.removesuffix(".py").split("/")[:2])


def sample(root: Path, size: int, *, seed: int, prefixes: tuple[str, ...] = ()) -> list[Mutant]:
    """Returns random mutants, equally many of each room as far as there are enough.

    Args:
        root: the repository.
        size: number of mutants.
        seed: of the choice; the same on any machine.
        prefixes: of the paths to change; all by default.
    """
    rng = random.Random(seed)
    rooms: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in _files(root, prefixes):
        for index in range(sum(1 for _ in _changes(ast.parse(path.read_text())))):
            name = path.relative_to(root).as_posix()
            rooms["/".join(name.removesuffix(".py").split("/")[:2])].append((path, index))
    for places in rooms.values():
        rng.shuffle(places)
    waiting, chosen = list(rooms.values()), []
    while waiting and len(chosen) < size:
        rng.shuffle(waiting)
        chosen += [places.pop() for places in waiting][: size - len(chosen)]
        waiting = [places for places in waiting if places]
    return [mutant(root, path, index) for path, index in chosen]


def mutant(root: Path, path: Path, index: int) -> Mutant:
    """Returns the mutant of a file with this index."""
    before = path.read_text()
    tree = ast.parse(before)
    node, new = next(change for i, change in enumerate(_changes(tree)) if i == index)
    start, end = _offset(before, node.lineno, node.col_offset), _offset(before, node.end_lineno, node.end_col_offset)
    source = before[:start] + ast.unparse(new) + before[end:]
    lines = difflib.unified_diff(before.splitlines(), source.splitlines(), n=0, lineterm="")
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    statement = _statement(tree, node)
    return Mutant(
        path=path.relative_to(root).as_posix(),
        lines=_lines(node),
        statement=_lines(statement),
        at_import=not any(_contains(body, node) for body in _bodies(tree)),
        source=source,
        change="\n".join(changed),
    )


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _contains(outer: ast.AST, node: ast.AST) -> bool:
    return any(part is node for part in ast.walk(outer))


def _statement(tree: ast.AST, node: ast.expr) -> ast.stmt:
    """The innermost statement around an expression; breadth first, so the last found."""
    return [part for part in ast.walk(tree) if isinstance(part, ast.stmt) and _contains(part, node)][-1]


def _bodies(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields what is executed when a function is called: its statements, without its decorators and defaults."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from function.body
        elif isinstance(function, ast.Lambda):
            yield function.body


def _files(root: Path, prefixes: tuple[str, ...]) -> list[Path]:
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return [f for f in files if not prefixes or f.relative_to(root).as_posix().startswith(prefixes)]


def _changes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields each expression that can change, in order of the source, with its replacement.

    None in the texts of errors and warnings, in annotations of types, and of options that change nothing in a program
    without faults of its own (`UNSEEN`).
    """
    skipped = {id(part) for node in ast.walk(tree) for hidden in _hidden(node) for part in ast.walk(hidden)}
    found = [
        (node, new)
        for node in ast.walk(tree)
        if isinstance(node, ast.expr) and not _is_annotation(node) and id(node) not in skipped
        for new in _replacements(node)
    ]
    return iter(sorted(found, key=lambda change: (change[0].lineno, change[0].col_offset)))


def _replacements(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in OPERATORS:
            yield ast.Compare(left, [OPERATORS[type(op)]()], [right])  # type: ignore[list-item]
        case ast.BoolOp(op, values):
            yield ast.BoolOp(OPERATORS[type(op)](), values)  # type: ignore[arg-type]
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(left, op, right) if type(op) in OPERATORS and not _is_text(left) and not _is_text(right):
            yield ast.BinOp(left, OPERATORS[type(op)](), right)  # type: ignore[arg-type]
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
        case ast.Call(ast.Name(name), args, keywords) if name in FUNCTIONS:
            kept = [] if FUNCTIONS[name] == "list" else keywords
            yield ast.Call(ast.Name(FUNCTIONS[name]), args, kept)
        case ast.Call(ast.Attribute(value, name), args, keywords) if name in FUNCTIONS:
            yield ast.Call(ast.Attribute(value, FUNCTIONS[name]), args, keywords)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)


def _hidden(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the parts of a node that no mutant changes."""
    match node:
        case ast.Call(func=ast.Name(id=name)) if name.endswith("Error") or name == "warn":
            yield node
        case ast.keyword(arg=name) if name in UNSEEN:
            yield node.value
        case ast.AnnAssign(annotation=annotation) | ast.arg(annotation=annotation) if annotation is not None:
            yield annotation
        case ast.FunctionDef(returns=ast.expr() as returns):
            yield returns


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_annotation(node: ast.expr) -> bool:
    """Whether an expression is a union of types: `int | None` is no operator that the table has."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _offset(text: str, line: int, column: int) -> int:
    """Returns the index of a position that the parser gives: a line from 1, and a column in UTF-8 bytes."""
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())
