"""`compare` and `check_lock`: differences between two completions of one program."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from .completion import Completion
from .display import Column, Row, Table, Tabular
from .display.text_table import ruled
from .errors import ShardingError
from .explain import Lock, value_list
from .graph import Graph, Op
from .spec import Spec

_ROWS = 20
_HEAD = ("value", "first", "bytes", "reason", "second", "bytes", "reason")
_NUMBERS = [k for k, head in enumerate(_HEAD) if head == "bytes"]
COLUMNS = (
    Column("value", "code"),
    *(
        c
        for side in ("first", "second")
        for c in (Column(side, "code"), Column(f"bytes, {side}", "bytes"), Column(f"reason, {side}"))
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One value in one completion."""

    value: int
    spec: Spec
    reason: str
    """`annotated`, or the ops its axes came through."""
    num_bytes: int
    """Bytes per device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that is sharded differently."""

    name: str
    """The value's name; for unnamed values, its type and the source line of its op."""
    first: Side
    second: Side

    @property
    def num_bytes(self) -> int:
        """Bytes per device, the larger of the two completions."""
        return max(self.first.num_bytes, self.second.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Tabular):
    """The values that two completions shard differently, largest first; prints as a short table."""

    first: Completion
    second: Completion
    num_values: int
    differences: tuple[Difference, ...]

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __len__(self) -> int:
        return len(self.differences)

    @property
    def same(self) -> bool:
        """Whether all values are sharded identically."""
        return not self.differences

    def rows(self) -> list[Row]:
        """(name, then spec, bytes and reason in both) of every difference; identical layers share a row."""
        rows = [(d.name, *_cells(d.first), *_cells(d.second)) for d in self]
        layers = self.first.assignment.graph.layers
        return [(name, *rows[members[0]][1:]) for name, members in layers.merged(rows)]

    def notes(self) -> list[str]:
        """The bytes of all values that differ."""
        first, second = (sum(getattr(d, side).num_bytes for d in self) for side in ("first", "second"))
        return [] if self.same else [f"bytes of these values per device: {first:,} and {second:,}"]

    def tables(self) -> list[Table]:
        """One table, of the rows."""
        return [Table(self._headline(), COLUMNS, self.rows())]

    def _headline(self) -> str:
        if self.same:
            return f"{self._title()}: all {self.num_values} values are sharded identically"
        return f"{self._title()}: {len(self)} of {self.num_values} values are sharded differently"

    def __str__(self) -> str:
        if self.same:
            return self._headline()
        rows = self.rows()
        table = [_HEAD, *(tuple(f"{x:,}" if isinstance(x, int) else x for x in row) for row in rows[:_ROWS])]
        more = [f"... and {len(rows) - _ROWS} more rows"] if len(rows) > _ROWS else []
        return "\n".join([self._headline(), *ruled(table, right=_NUMBERS), *more, *self.notes()])

    __repr__ = __str__

    def _title(self) -> str:
        meshes = dict.fromkeys(_mesh(c) for c in (self.first, self.second))
        return f"{self.first.name} on mesh {' and '.join(meshes)}"


def check_lock(completion: Completion, path: str | os.PathLike[str]) -> None:
    """Checks a completion against a lock file written by `Completion.lock`.

    Raises:
        ShardingError: the completion differs, with each difference; or the file is not a lock file.
    """
    lines = Lock.read(path).diff(completion.locked())
    if lines:
        raise ShardingError(
            f"{completion.name}: check_lock({os.fspath(path)!r})",
            found=list(lines),
            required="the sharding and costs in the lock file",
            fix=f"revert the change, or accept it by completion.lock({os.fspath(path)!r})",
        )


def compare(first: Completion, second: Completion) -> Comparison:
    """The values that two completions of one program shard differently.

    Engines, meshes and annotations may differ. `bytes` are per value and device; a value that one program annotates at
    a use is compared at that use.

    Raises:
        ShardingError: the programs differ in more than their annotations.

    Example:
        >>> import jax
        >>> import sharding
        >>> from sharding import P
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> def completed(spec):
        ...     return sharding.jit(lambda x: x + 1, in_shardings=spec).complete(x)
        >>> with sharding.mesh(data=2, tensor=4):
        ...     comparison = sharding.compare(completed(P("data")), completed(P(None, "tensor")))
        >>> print(str(comparison).splitlines()[0])
        <lambda> on mesh data=2, tensor=4: 3 of 4 values are sharded differently
    """
    pairs = _pairs(first, second)
    found = [
        Difference(name=_name(first, a), first=_side(first, a), second=_side(second, b))
        for a, b in pairs
        if first.assignment.specs[a].axes != second.assignment.specs[b].axes
    ]
    found.sort(key=lambda d: -d.num_bytes)
    return Comparison(first=first, second=second, num_values=len(pairs), differences=tuple(found))


def _pairs(first: Completion, second: Completion) -> list[tuple[int, int]]:
    """Pairs of corresponding values: arguments, then operands and results of all ops."""
    one, other = (_Skeleton(c.assignment.graph) for c in (first, second))
    graphs = (one.graph, other.graph)
    if [g.shapes[v] for g in graphs[:1] for v in g.inputs] != [g.shapes[v] for g in graphs[1:] for v in g.inputs]:
        raise _different(first, second, *(f"arguments of shapes {[g.shapes[v] for v in g.inputs]}" for g in graphs))
    if len(one.ops) != len(other.ops) or len(graphs[0].outputs) != len(graphs[1].outputs):
        counts = (f"{len(s.ops)} ops and {len(s.graph.outputs)} results" for s in (one, other))
        raise _different(first, second, *counts)
    pairs = list(zip(graphs[0].inputs, graphs[1].inputs, strict=True))
    for i, (a, b) in enumerate(zip(one.ops, other.ops, strict=True)):
        if one.description(a) != other.description(b):
            raise _different(first, second, *(f"op {i} is {s.text(op)}" for s, op in ((one, a), (other, b))))
        pairs += zip((*a.operands, *a.results), (*b.operands, *b.results), strict=True)
    return list(dict.fromkeys(pairs))


class _Skeleton:
    """A graph stripped of its annotations."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.ops = [op for op in graph.ops if op.name != "annotate"]
        self.unannotated = {op.results[0]: op.operands[0] for op in graph.ops if op.name == "annotate"}
        self.origin: dict[int, tuple[str, int]] = {v: ("argument", i) for i, v in enumerate(graph.inputs)}
        made = ((v, (f"result {k}", i)) for i, op in enumerate(self.ops) for k, v in enumerate(op.results))
        for v, origin in made:
            self.origin.setdefault(v, origin)

    def description(self, op: Op) -> tuple:
        """The part of an op that does not depend on annotations."""
        shapes, dtypes = self.graph.shapes, self.graph.dtypes
        arrays = [(shapes[v], str(dtypes[v])) for v in (*op.operands, *op.results)]
        return op.name, op.times, arrays, [self.origin.get(self.root(v)) for v in op.operands]

    def root(self, value: int) -> int:
        """The value before any annotations of it."""
        while value in self.unannotated:
            value = self.unannotated[value]
        return value

    def text(self, op: Op) -> str:
        """A description of an op, for errors."""
        shapes = ", ".join(str(list(self.graph.shapes[v])) for v in op.operands)
        return f"{op.name} of {shapes}" + (f" at {op.source}" if op.source else "")


def _different(first: Completion, second: Completion, *found: str) -> ShardingError:
    return ShardingError(
        f"sharding.compare({first.name}, {second.name})",
        found=[f"{which}: {what}" for which, what in zip(("first", "second"), found, strict=True)],
        required="completions of one program: the same function on arguments of the same shapes",
        fix="another engine, mesh, in_shardings or annotations of the same function",
    )


def _side(completion: Completion, value: int) -> Side:
    spec = completion.assignment.specs[value]
    word, size = value_list.word(completion.assignment, value), completion.num_bytes(value, spec)
    return Side(value=value, spec=spec, reason=word, num_bytes=size)


def _name(completion: Completion, value: int) -> str:
    graph = completion.assignment.graph
    label, source = graph.label(value), graph.source(value)
    return label if value in graph.first_names or not source else f"{label} at {source}"


def _cells(side: Side) -> tuple[str, int, str]:
    return str(side.spec), side.num_bytes, side.reason


def _mesh(completion: Completion) -> str:
    return ", ".join(f"{k}={v}" for k, v in completion.assignment.sizes.items())
