"""Builder of a random program: its values, the facts known of each, and the records so far.

Values are bounded so that results can be compared: no float exceeds `LIMIT`, and discontinuous ops (compare, sort,
argmax, max, ...) are only applied to *exact* floats: multiples of 2**-grid that the dtype represents for any order of
summation, so that they are bit-identical on every mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import sharding

from . import prelude
from .case import Argument, Block, Entry, Place, Record, SpecData, Type

LIMIT = 4.0
INT_LIMIT = 1000
BITS = {"F": 24, "H": 8}
NAMES = {
    **vars(prelude),
    "sharding": sharding,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "F": jnp.float32,
    "H": jnp.bfloat16,
    "C": jnp.complex64,
}
DTYPES = {"float32": "F", "bfloat16": "H", "complex64": "C", "key<fry>": "key"}
SIZES = (1, 2, 2, 3, 4, 4, 4, 5, 6, 8, 8)
ELEMENTS = 1024
STORE = 'put(lax.stop_gradient($0), $s, "pinned_host")'
"""Without derivative: JAX has none for arrays that move to the host's memory."""


class SkipOp(Exception):
    """Raised by an op without suitable operands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a value: type, bound, and, if exact, the grid: it is a multiple of 2**-grid."""

    type: Type
    bound: float = 1.0
    grid: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    @property
    def size(self) -> int:
        return math.prod(self.type.shape)

    @property
    def exact(self) -> bool:
        return self.type.dtype not in ("F", "H", "C") or self.grid is not None


@dataclass(slots=True)
class Frame:
    """A block under construction.

    A closed one does not see values of enclosing blocks; a pure one does not write to their refs.
    """

    params: list[int]
    closed: bool
    pure: bool = False
    visible: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


@functools.lru_cache(maxsize=50_000)
def infer(text: str, types: tuple[Type, ...]) -> Any:
    """The type of an expression's value, or a tuple of types."""
    names = [f"x{i}" for i in range(len(types))]
    source = re.sub(r"\$(\d+)", r"x\1", text).replace("$s", "None")
    f = eval(
        f"lambda {', '.join(names)}: {source}", NAMES | {"annotate": prelude.plain, "put": prelude.put_on_one_device}
    )
    out = jax.eval_shape(f, *map(_abstract, types))
    kinds = [Type(shape=x.shape, dtype=DTYPES.get(str(x.dtype), str(x.dtype))) for x in jax.tree.leaves(out)]
    return tuple(kinds) if isinstance(out, (tuple, list)) else kinds[0]


def _abstract(kind: Type) -> jax.ShapeDtypeStruct:
    if kind.dtype == "key":
        return jax.ShapeDtypeStruct(kind.shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    return jax.ShapeDtypeStruct(kind.shape, NAMES.get(kind.dtype, kind.dtype))


class Builder:
    """Builds one program; ops request operands and emit records."""

    def __init__(self, rng: random.Random, mesh: dict[str, int]):
        self.rng, self.mesh = rng, mesh
        self.facts: dict[int, Facts] = {}
        self.arguments: list[Argument] = []
        self.frames: list[Frame] = [Frame([], False)]
        self.coarse = False
        self.given: dict[int, SpecData] = {}
        """Arguments whose spec is decided, by value."""
        self.trained: list[int] = []
        """Arguments that must be differentiated with respect to, by value."""

    # choices

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def choice(self, items: Sequence[Any]) -> Any:
        return items[self.rng.randrange(len(items))]

    def size(self) -> int:
        return self.choice(SIZES)

    def dim(self, x: int) -> int:
        """A dim of a value."""
        if not self.facts[x].ndim:
            raise SkipOp
        return self.rng.randrange(self.facts[x].ndim)

    def dims(self, x: int) -> tuple[int, ...]:
        """One or more dims of a value, in order."""
        if not self.facts[x].ndim:
            raise SkipOp
        return tuple(sorted(self.rng.sample(range(self.facts[x].ndim), self.rng.randint(1, self.facts[x].ndim))))

    # values

    @property
    def visible(self) -> list[int]:
        found: list[int] = []
        for frame in reversed(self.frames):
            found = [*frame.visible, *found]
            if frame.closed:
                break
        return found

    @property
    def refs(self) -> list[int]:
        """The visible refs that may be written to here."""
        found: list[int] = []
        for frame in reversed(self.frames):
            found = [*(v for v in frame.visible if self.facts[v].type.place == "ref"), *found]
            if frame.closed or frame.pure:
                break
        return found

    def pick(
        self, wanted: Callable[[Facts], bool], make: Callable[[], Type] | None = None, *, place: Place = "device"
    ) -> int:
        """A visible value, preferably a recent one, or a new argument of the type that `make` returns."""
        open_here = not any(f.closed or (f.pure and place == "ref") for f in self.frames)
        visible = self.refs if place == "ref" else self.visible
        found = [v for v in visible if self.facts[v].type.place == place and wanted(self.facts[v])]
        if make is not None and open_here and (not found or self.chance(0.2)):
            kind = make()
            if wanted(fresh(kind)):
                return self.argument(kind)
        if not found:
            raise SkipOp
        return found[-1 - int(len(found) * self.rng.random() ** 3)]

    def float(self, low: int = 0, high: int = 5, *, exact: bool = False, wanted=lambda f: True) -> int:
        """A float value with its number of dims within bounds."""

        def fits(f: Facts) -> bool:
            return f.type.dtype in BITS and low <= f.ndim <= high and (f.exact or not exact) and wanted(f)

        return self.pick(fits, lambda: Type(shape=self.shape(low, min(high, 4)), dtype="F"))

    def int(self, low: int = 0, high: int = 5, *, wanted=lambda f: True) -> int:
        def fits(f: Facts) -> bool:
            return f.type.dtype == "int32" and low <= f.ndim <= high and wanted(f)

        return self.pick(fits, lambda: Type(shape=self.shape(low, min(high, 3)), dtype="int32"))

    def exact(self, low: int = 0, high: int = 5) -> int:
        """An exact float or an integer."""
        return self.float(low, high, exact=True) if self.chance(0.7) else self.int(low, high)

    def number(self, low: int = 0, high: int = 5) -> int:
        return self.float(low, high) if self.chance(0.85) else self.int(low, high)

    def any(self, low: int = 0, high: int = 5) -> int:
        """Any array except of PRNG keys."""
        return self.pick(lambda f: f.type.dtype != "key" and low <= f.ndim <= high, lambda: self.new_type(low))

    def new_type(self, low: int = 0) -> Type:
        return Type(shape=self.shape(low, 4), dtype=self.choice(["F", "F", "F", "int32", "bool"]))

    def shape(self, low: int, high: int) -> tuple[int, ...]:
        ndim = self.rng.randint(max(low, min(1, high)), max(low, min(3, high)))
        shape = [self.size() for _ in range(ndim)]
        while math.prod(shape) > ELEMENTS:
            shape[self.rng.randrange(ndim)] = 2
        return tuple(shape)

    def like(self, x: int, **more: Any) -> int:
        """A value of the same type: an existing one, one broadcast from another, or a new argument."""
        f = self.facts[x]
        way = self.rng.random()
        if way < 0.6:
            exact = more.get("exact", False)
            return self.pick(lambda o: o.type == f.type and (o.exact or not exact), lambda: f.type)
        if way < 0.9 and f.ndim:
            keep = tuple(d for d in range(f.ndim) if self.chance(0.5))
            small = Type(shape=tuple(f.shape[d] for d in keep), dtype=f.type.dtype)
            exact = more.get("exact", False)
            y = self.pick(lambda o: o.type == small and (o.exact or not exact), lambda: small)
            text = f"lax.broadcast_in_dim($0, {f.shape}, {keep})"
            return self.emit("broadcast_in_dim", text, [y], bound=self.facts[y].bound, grid=self.facts[y].grid)
        return x

    def argument(self, kind: Type) -> int:
        """A new argument of the program; bodies close over it."""
        if any(f.closed for f in self.frames):
            raise SkipOp
        v = self.new(fresh(kind))
        self.arguments.append(Argument(value=v, type=kind))
        self.frames[0].visible.append(v)
        return v

    def new(self, facts: Facts) -> int:
        v = len(self.facts)
        self.facts[v] = facts
        return v

    # records

    def emit(
        self,
        op: str,
        text: str,
        operands: Sequence[int],
        *,
        bound: float = LIMIT,
        grid: int | None = None,
        spec: SpecData | None = None,
        place: Place = "device",
    ) -> int:
        """Emits a record with one result, scaled or wrapped if it could exceed the limit."""
        types = tuple(self.facts[v].type for v in operands)
        kind = self.inferred(text, types)
        if isinstance(kind, tuple) or math.prod(kind.shape) > ELEMENTS or len(kind.shape) > 6:
            raise SkipOp
        if kind.dtype in (*BITS, "C") and bound > LIMIT:
            k = math.ceil(math.log2(bound / 2))
            text, bound, grid = f"({text}) * {2.0**-k}", bound * 2.0**-k, None if grid is None else grid + k
        if kind.dtype in ("int32", "uint32") and bound > INT_LIMIT:
            text, bound = f"({text}) % 97", 96
        kind = dataclasses.replace(kind, place=place)
        facts = self.checked(kind, bound, grid)
        v = self.new(facts)
        record = Record(op=op, text=text, operands=tuple(operands), results=(v,), types=(kind,), spec=spec)
        self.put(record)
        return v

    def emit_all(self, op: str, text: str, operands: Sequence[int], facts: Callable[[Type], Facts]) -> list[int]:
        """Emits a record with several results."""
        kinds = self.inferred(text, tuple(self.facts[v].type for v in operands))
        if not isinstance(kinds, tuple) or any(math.prod(k.shape) > ELEMENTS for k in kinds):
            raise SkipOp
        values = [self.new(facts(k)) for k in kinds]
        self.put(Record(op=op, text=text, operands=tuple(operands), results=tuple(values), types=kinds))
        return values

    def inferred(self, text: str, types: tuple[Type, ...]) -> Any:
        try:
            return infer(text, types)
        except (TypeError, ValueError, ZeroDivisionError) as e:
            raise AssertionError(f"the grammar wrote {text} for {types}") from e

    def checked(self, kind: Type, bound: float, grid: int | None) -> Facts:
        """Facts of a new value; exact only if its dtype can represent it."""
        if kind.dtype in BITS:
            if grid is not None and bound * 2.0**grid > 2.0 ** BITS[kind.dtype]:
                grid = None
            self.coarse |= kind.dtype == "H" and grid is None
        elif kind.dtype == "C":
            grid = None
        return Facts(type=kind, bound=bound, grid=grid)

    def put(self, record: Record) -> None:
        self.frames[-1].records.append(record)
        self.frames[-1].visible += record.results

    def open(self, params: Sequence[Facts], *, closed: bool, pure: bool = False) -> list[int]:
        """Begins a body and returns its parameters."""
        values = [self.new(f) for f in params]
        self.frames.append(Frame(list(values), closed, pure, visible=list(values)))
        return values

    def close(self, results: Sequence[int]) -> Block:
        frame = self.frames.pop()
        return Block(params=tuple(frame.params), records=tuple(frame.records), results=tuple(results))

    def fit(self, facts: Facts) -> int:
        """A value of the given type, bound and exactness, built from visible values."""
        kind = facts.type
        if kind.place == "pinned_host":
            x = self.fit(dataclasses.replace(facts, type=dataclasses.replace(kind, place="device")))
            return self.emit(
                "store in host memory", STORE, [x], bound=facts.bound, grid=self.facts[x].grid, place="pinned_host"
            )
        if kind.dtype not in ("F", "int32"):
            return self.pick(lambda f: f.type == kind)
        same = [v for v in self.visible if self.facts[v].type == kind]
        x = same[-1] if same and self.chance(0.8) else self.choice(same) if same else None
        parts = self.float(0, 5) if kind.dtype == "F" else self.int(0, 5)
        ndim = self.facts[parts].ndim
        whole = "jnp.sum($0, dtype=$0.dtype)" if ndim else "$0"  # under x64 a sum of int32 is int64
        if self.facts[parts].type.dtype == "H":
            whole = f"{whole}.astype(F)"
        if kind.dtype == "F":
            total = f"jnp.broadcast_to(jnp.tanh({whole}), {kind.shape})"
            text = total if x is None else f"jnp.tanh($1 + {total})"
        else:
            total = f"jnp.broadcast_to({whole}, {kind.shape})"
            text = f"({total}) % 7" if x is None else f"($1 + {total}) % 7"
        return self.emit("fit", text, [parts] if x is None else [parts, x], bound=1 if kind.dtype == "F" else 6)

    # specs

    def spec(self, shape: tuple[int, ...], *, divides: bool, open_dims: float = 0.25) -> SpecData:
        """A random spec: axes on dims, open dims, tuples ending in `...`."""
        axes = list(self.mesh)
        self.rng.shuffle(axes)
        entries: list[Entry] = []
        for size in shape:
            taken: list[str] = []
            while axes and self.chance(0.5 if not taken else 0.25):
                parts = math.prod(self.mesh[a] for a in (*taken, axes[-1]))
                if (divides and size % parts) or (not divides and size % parts and self.chance(0.8)):
                    break
                taken.append(axes.pop())
            if not taken:
                entries.append("?" if self.chance(open_dims) else None)
            elif self.chance(open_dims / 2):
                entries.append((*taken, "..."))
            else:
                entries.append(taken[0] if len(taken) == 1 and self.chance(0.8) else tuple(taken))
        while entries and entries[-1] is None and self.chance(0.5):
            entries.pop()
        return tuple(entries)


def fresh(kind: Type) -> Facts:
    """Facts of an argument, see `prelude.array`; what is written to a ref has the limits only."""
    if kind.place == "ref":
        return Facts(type=kind, bound=INT_LIMIT if kind.dtype == "int32" else LIMIT)
    if kind.dtype in BITS:
        return Facts(type=kind, bound=2.0, grid=3)
    return Facts(type=kind, bound=7 if kind.dtype == "int32" else 1)
