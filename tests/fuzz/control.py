"""Loops, branches, calls and derivative rules: ops with bodies."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .builder import ELEMENTS, INT_LIMIT, Builder, Facts, SkipOp
from .case import Block, Record, Type, walk

DEPTH = 2
Grow = Callable[[Builder, int], None]
"""(builder, number of ops) -> None; adds ops to the innermost body."""


def with_bodies(g: Builder, op: str, text: str, operands: Sequence[int], facts: Sequence[Facts], bodies) -> list[int]:
    """Emits a record with bodies, which its text refers to as `$f0`, ..."""
    if any(f.size > ELEMENTS or f.ndim > 6 for f in facts):
        raise SkipOp
    values = [g.new(f) for f in facts]
    kinds = tuple(f.type for f in facts)
    record = Record(
        op=op, text=text, operands=tuple(operands), results=tuple(values), types=kinds, bodies=tuple(bodies)
    )
    g.put(record)
    return values


def loose(f: Facts) -> Facts:
    """Facts of a carried value: it changes from step to step, so its floats are not exact."""
    if f.type.dtype == "F":
        return Facts(type=f.type, bound=max(f.bound, 1.0))
    return Facts(type=f.type, bound=max(f.bound, 6))


def names(values: Sequence[int], start: int = 0) -> str:
    return ", ".join(f"${start + i}" for i in range(len(values)))


def carried(g: Builder) -> list[int]:
    """One or two values to carry through a loop; occasionally one that waits in the host's memory."""
    found = [g.float(1, 3, wanted=lambda f: f.type.dtype == "F")]
    if g.chance(0.4):
        found.append(g.float(0, 3, wanted=lambda f: f.type.dtype == "F") if g.chance(0.6) else g.int(0, 2))
    if g.chance(0.1):
        found.append(on_host(g, 1))
    return list(dict.fromkeys(found))


def on_host(g: Builder, low: int = 0) -> int:
    """A float in the host's memory."""
    return g.pick(lambda f: f.type.dtype == "F" and low <= f.ndim <= 4, place="pinned_host")


def body(g: Builder, grow: Grow, params: Sequence[Facts], results: Sequence[Facts], *, closed: bool = False) -> Block:
    """A body of a few random ops that returns values of the given types."""
    depth = len(g.frames)
    if depth > DEPTH:
        raise SkipOp
    g.open(params, closed=closed)
    try:
        grow(g, g.rng.randint(1, 4))
        found = [g.fit(f) for f in results]
    except SkipOp:
        del g.frames[depth:]
        raise
    return g.close(found)


def free_body(
    g: Builder, grow: Grow, params: Sequence[Facts], *, closed: bool = False, pure: bool = False
) -> tuple[Block, list[Facts]]:
    """A body that returns one or two floats of any types."""
    depth = len(g.frames)
    if depth > DEPTH:
        raise SkipOp
    g.open(params, closed=closed, pure=pure)
    try:
        grow(g, g.rng.randint(1, 4))
        made = [r for record in g.frames[-1].records for r in record.results if _is_float(g.facts[r])]
        found = made[-2:] if made and g.chance(0.4) else made[-1:]
    except SkipOp:
        del g.frames[depth:]
        raise
    if not found:
        del g.frames[depth:]
        raise SkipOp
    return g.close(found), [g.facts[v] for v in found]


def _is_float(f: Facts) -> bool:
    return f.type.dtype == "F" and f.type.place == "device"


def inexact(f: Facts) -> Facts:
    return Facts(type=f.type, bound=f.bound) if f.type.dtype == "F" else f


def scan(g: Builder, grow: Grow) -> None:
    inits = carried(g)
    length, xs = g.choice([2, 3, 4]), []
    if g.chance(0.7):
        first = g.number(1, 4) if g.chance(0.85) else on_host(g, 1)
        length, xs = g.facts[first].shape[0], [first]
        if g.chance(0.3):
            xs.append(
                g.number(1, 4)
                if g.facts[first].ndim == 0
                else g.pick(lambda f: f.ndim > 0 and f.shape[0] == length and f.type.dtype in ("F", "int32"))
            )
    if length > 8:
        raise SkipOp
    carry = [loose(g.facts[v]) for v in inits]
    slices = [
        Facts(type=Type(shape=f.shape[1:], dtype=f.type.dtype, place=f.type.place), bound=f.bound, grid=f.grid)
        for f in map(g.facts.__getitem__, xs)
    ]
    ys = [Facts(type=c.type, bound=6 if c.type.dtype == "int32" else 1) for c in carry[: g.choice([0, 1, 1])]]
    block = body(g, grow, [*carry, *slices], [*carry, *ys])
    stacked = [
        Facts(type=Type(shape=(length, *f.shape), dtype=f.type.dtype, place=f.type.place), bound=f.bound) for f in ys
    ]
    options = g.choice(["", "", ", reverse=True", ", unroll=2"])
    text = f"scan($f0, {len(inits)}, {length}, {names([*inits, *xs])}{options})"
    with_bodies(g, "scan", text, [*inits, *xs], [*carry, *stacked], [block])


def while_loop(g: Builder, grow: Grow) -> None:
    """Not differentiated: its body is closed, and its operands are constants."""
    inits = carried(g)
    n = len(inits)
    carry = [loose(g.facts[v]) for v in inits]
    stopped = ", ".join(f"lax.stop_gradient(${i})" for i in range(n))
    op = g.choice(["while_loop", "while_loop of its state", "fori_loop of unknown bounds"])
    if op == "while_loop":
        more, results = [g.int(0, 0)], carry
        text = f"while_loop($f0, ${n} % 4, {stopped})"
    elif op == "while_loop of its state":
        more = [g.int(1, 2)]
        counts = g.facts[more[0]]
        results = [Facts(type=counts.type, bound=counts.size * 4 + 7), *carry]
        text = f"while_below($f0, {g.choice([2, 4]) * counts.size}, ${n} % 7, {stopped})"
    else:
        more, results = [g.int(0, 0), g.int(0, 0)], carry
        text = f"fori_between($f0, ${n} % 3 - 1, ${n + 1} % 4, {stopped})"
    block = body(g, grow, carry, carry, closed=True)
    with_bodies(g, op, text, [*inits, *more], results, [block])


def fori_loop(g: Builder, grow: Grow) -> None:
    inits = carried(g)
    carry = [loose(g.facts[v]) for v in inits]
    times, static = str(g.choice([1, 2, 3])), []
    if g.chance(0.3):
        static = [static_argument(g)]
        times = f"${len(inits)}"
    block = body(g, grow, carry, carry)
    with_bodies(g, "fori_loop", f"fori_loop($f0, {times}, {names(inits)})", [*inits, *static], carry, [block])


def static_argument(g: Builder) -> int:
    """An integer of 1 to 3 that is known when the program is traced."""
    return g.pick(lambda f: True, lambda: Type(shape=(), dtype="int32", place="static"), place="static")


def static_factor(g: Builder, grow: Grow) -> None:
    del grow
    x = g.float()
    f = g.facts[x]
    g.emit("static factor", "$0 * $1", [x, static_argument(g)], bound=3 * f.bound, grid=f.grid)


def cond(g: Builder, grow: Grow) -> None:
    """A cond of two branches, or a switch of three."""
    operands = carried(g)
    params = [inexact(g.facts[v]) for v in operands]
    results = [Facts(type=f.type, bound=6 if f.type.dtype == "int32" else 1) for f in params]
    if g.chance(0.6):
        which = g.pick(lambda f: f.type.dtype == "bool" and not f.shape, lambda: Type(shape=(), dtype="bool"))
        bodies = [body(g, grow, params, results) for _ in range(2)]
        text = f"lax.cond(${len(operands)}, $f0, $f1, {names(operands)})"
        with_bodies(g, "cond", text, [*operands, which], results, bodies)
    else:
        which = g.int(0, 0)
        bodies = [body(g, grow, params, results) for _ in range(3)]
        text = f"lax.switch(${len(operands)} % 3, [$f0, $f1, $f2], {names(operands)})"
        with_bodies(g, "switch", text, [*operands, which], results, bodies)


CALLS = {
    "checkpoint": "jax.checkpoint($f0)({})",
    "checkpoint by policy": "jax.checkpoint($f0, policy=jax.checkpoint_policies.dots_saveable)({})",
    "checkpoint with offloading": "offloaded($f0, {})",
    "nested jit": "jax.jit($f0)({})",
    "nested jit, called twice": "twice($f0, {})",
    "nested sharding.jit": "jit($f0)({})",
    "custom_vjp": "custom_vjp($f0, {})",
    "custom_jvp": "custom_jvp($f0, {})",
}


def call(g: Builder, grow: Grow) -> None:
    op = g.choice(list(CALLS))
    operands = [g.float(1, 4, wanted=lambda f: f.type.dtype == "F") for _ in range(g.choice([1, 2]))]
    params = [inexact(g.facts[v]) for v in operands]
    pure = "jit" not in op or "twice" in op
    block, results = free_body(g, grow, params, closed=op.startswith("custom"), pure=pure)
    if op == "custom_jvp":
        _refuse_backward_rules(block)
    with_bodies(g, op, CALLS[op].format(names(operands)), operands, list(map(inexact, results)), [block])


def _refuse_backward_rules(block: Block) -> None:
    """Not under a tangent: JAX cannot forward-differentiate a custom_vjp function."""
    if any(record.op == "custom_vjp" for record in walk(block.records)):
        raise SkipOp


UNMAPPED = ("callback", "debug", "custom_partitioning", "ffi_call", "host", "offload", "own primitive", "shard_map")
"""Words of ops that JAX refuses in the body of a `shard_map` over some axes, or that name its axes by themselves."""


def shard_map(g: Builder, grow: Grow) -> None:
    """Manual over one of several axes."""
    axes = [axis for axis, size in g.mesh.items() if size > 1]
    if len(axes) < 2:
        raise SkipOp
    axis, check = g.choice(axes), g.chance(0.5)
    operands = [g.float(1, 4, wanted=lambda f: f.type.dtype == "F") for _ in range(g.choice([1, 2]))]
    params = [inexact(g.facts[v]) for v in operands]
    block, results = free_body(g, grow, params, closed=True, pure=True)
    for record in walk(block.records):
        if (
            any(word in record.op for word in UNMAPPED)
            or record.op == "nested sharding.jit"
            or axis in str(record.spec)
        ):
            raise SkipOp
    text = f'in_shard_map($f0, "{axis}", {check}, {names(operands)})'
    with_bodies(g, "shard_map", text, operands, list(map(inexact, results)), [block])


def derivative(g: Builder, grow: Grow) -> None:
    """A gradient or a tangent in the middle of the program."""
    op = g.choice(["gradient", "tangent"])
    operands = [g.float(1, 3, wanted=lambda f: f.type.dtype == "F") for _ in range(g.choice([1, 2]))]
    params = [inexact(g.facts[v]) for v in operands]
    block, results = free_body(g, grow, params, pure=True)
    if op == "tangent":
        _refuse_backward_rules(block)
    shapes = params if op == "gradient" else results
    loud = [Facts(type=f.type, bound=1) for f in shapes]  # unbounded: subsequent ops take them through tanh
    values = with_bodies(g, op, f"{op}($f0, {names(operands)})", operands, loud, [block])
    for v in values:
        g.emit("tanh", "jnp.tanh($0)", [v], bound=1)


def vmap(g: Builder, grow: Grow) -> None:
    first = g.float(1, 4, wanted=lambda f: f.type.dtype == "F")
    d = g.dim(first)
    n = g.facts[first].shape[d]
    operands, at = [first], [d]
    if g.chance(0.5):
        other = g.number(0, 3)
        places = [k for k, m in enumerate(g.facts[other].shape) if m == n]
        operands.append(other)
        at.append(g.choice(places) if places and g.chance(0.7) else None)
    params = [_without(inexact(g.facts[v]), k) for v, k in zip(operands, at, strict=True)]
    block, results = free_body(g, grow, params, pure=True)
    outs = [g.rng.randint(0, f.ndim) for f in results]
    facts = [
        Facts(type=Type(shape=(*f.shape[:k], n, *f.shape[k:]), dtype="F"), bound=f.bound)
        for f, k in zip(results, outs, strict=True)
    ]
    text = f"jax.vmap($f0, {tuple(at)}, {tuple(outs)})({names(operands)})"
    with_bodies(g, "vmap", text, operands, facts, [block])


def _without(f: Facts, d: int | None) -> Facts:
    if d is None:
        return f
    shape = (*f.shape[:d], *f.shape[d + 1 :])
    return Facts(type=Type(shape=shape, dtype=f.type.dtype), bound=f.bound, grid=f.grid)


def associative_scan(g: Builder, grow: Grow) -> None:
    del grow
    x = g.float(1, 3)
    d, f = g.dim(x), g.facts[x]
    if f.type.dtype != "F":
        raise SkipOp
    g.emit(
        "associative_scan",
        f"lax.associative_scan(lambda a, b: a * 0.5 + b, $0, axis={d})",
        [x],
        bound=2 * f.bound * math.log2(f.shape[d] + 1),
    )


def reduce_alike(g: Builder, grow: Grow) -> None:
    """`lax.reduce` of two arrays with a custom computation, which has no derivative."""
    del grow
    x = g.int(1, 3)
    y = g.like(x)
    d = g.dim(x)
    text = (
        "lax.reduce(($0, $1), (jnp.int32(0), jnp.int32(0)), "
        f"lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]), ({d},))"
    )
    bound = max(g.facts[x].bound, g.facts[y].bound * g.facts[x].shape[d])
    if bound > INT_LIMIT:
        raise SkipOp
    g.emit_all("reduce", text, [x, y], lambda kind: Facts(type=kind, bound=bound))


OPS = {
    scan: 5,
    while_loop: 4,
    static_factor: 1,
    fori_loop: 2,
    cond: 4,
    call: 6,
    derivative: 1,
    vmap: 4,
    shard_map: 3,
    associative_scan: 1,
    reduce_alike: 1,
}
"""Op -> relative frequency."""
