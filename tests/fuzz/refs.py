"""Mutable arrays: made inside the program or passed to it, read and written, whole or at an index."""

from __future__ import annotations

from .builder import LIMIT, Builder, Facts, SkipOp, fresh
from .case import Record, Type
from .control import Grow, body, inexact, with_bodies


def ref(g: Builder, low: int = 0) -> int:
    """A ref that may be written to here: made of a value, or an argument."""
    if g.chance(0.4):
        return new(g, low)
    return g.pick(
        lambda f: f.ndim >= low, lambda: Type(shape=g.shape(max(1, low), 3), dtype="F", place="ref"), place="ref"
    )


def new(g: Builder, low: int = 0) -> int:
    x = g.float(low, 3, wanted=lambda f: f.type.dtype == "F") if g.chance(0.8) else g.int(low, 2)
    kind = g.facts[x].type
    kind = Type(shape=kind.shape, dtype=kind.dtype, place="ref")
    v = g.new(fresh(kind))
    g.put(Record(op="new_ref", text="jax.new_ref($0)", operands=(x,), results=(v,), types=(kind,)))
    return v


def read(g: Builder) -> None:
    r = ref(g)
    text, operands, shape = _index(g, r, 1)
    _emit(g, "read ref", f"$0[{text}]", [r, *operands], shape)


def write(g: Builder) -> None:
    r = ref(g)
    f = g.facts[r]
    text, operands, shape = _index(g, r, 2)
    kind = Type(shape=shape, dtype=f.type.dtype)
    x = g.pick(lambda o: o.type == kind, None if g.chance(0.5) else lambda: kind)
    if f.type.dtype == "F":
        op, way = g.choice(
            [("write ref", "written($0, $1, {})"), ("add to ref", "added($0, jnp.tanh($1) - 0.5 * $0[{}], {})")]
        )
    else:
        op, way = "write ref", "written($0, ($1 + $0[{}]) % 7, {})"
    _emit(g, op, way.replace("{}", text), [r, x, *operands], shape)


def swap(g: Builder) -> None:
    r = ref(g)
    f = g.facts[r]
    x = g.pick(lambda o: o.type == Type(shape=f.shape, dtype=f.type.dtype))
    _emit(g, "swap ref", "jax.ref.swap($0, Ellipsis, $1)", [r, x], f.shape)


def rows(g: Builder, grow: Grow) -> None:
    """A loop over the rows of a ref, each written in its iteration."""
    r = ref(g, 1)
    f = g.facts[r]
    if f.type.dtype != "F" or f.shape[0] > 8:
        raise SkipOp
    x = g.float(0, 2, wanted=lambda f: f.type.dtype == "F")
    row = Facts(type=Type(shape=f.shape[1:], dtype="F"), bound=LIMIT)
    block = body(g, grow, [row, inexact(g.facts[x])], [row])
    whole = Facts(type=Type(shape=f.shape, dtype="F"), bound=LIMIT)
    with_bodies(g, "write ref in a loop", "rows_written($f0, $0, $1)", [r, x], [whole], [block])


def _emit(g: Builder, op: str, text: str, operands: list[int], shape: tuple[int, ...]) -> None:
    f = g.facts[operands[0]]
    kind = Type(shape=shape, dtype=f.type.dtype)
    v = g.new(Facts(type=kind, bound=f.bound))
    g.put(Record(op=op, text=text, operands=tuple(operands), results=(v,), types=(kind,)))


def _index(g: Builder, r: int, start: int) -> tuple[str, list[int], tuple[int, ...]]:
    """An index into a ref, its operands, which are numbered from `start`, and the shape that it reads."""
    shape = g.facts[r].shape
    way = g.choice(["all", "row", "rows", "computed"]) if shape else "all"
    if way == "row":
        return str(g.rng.randrange(shape[0])), [], shape[1:]
    if way == "rows":
        first = g.rng.randrange(shape[0])
        last = g.rng.randint(first + 1, shape[0])
        return f"slice({first}, {last})", [], (last - first, *shape[1:])
    if way == "computed":
        return f"jnp.abs(${start}) % {shape[0]}", [g.int(0, 0)], shape[1:]
    return "...", [], shape


OPS = {read: 3, write: 6, swap: 1}
"""Op -> relative frequency."""
