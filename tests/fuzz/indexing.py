"""Gathers, scatters and dynamic slices."""

from __future__ import annotations

from .builder import Builder, SkipOp
from .case import Type


def _indices(g: Builder, high: int = 2) -> int:
    return g.int(1, high)


def take(g: Builder) -> None:
    x = g.number(1)
    f, d = g.facts[x], g.dim(x)
    if f.ndim > 3:
        raise SkipOp
    i = _indices(g)
    n = f.shape[d]
    text = g.choice(
        [
            f"jnp.take($0, $1 % {n}, {d})",
            f'jnp.take($0, $1, {d}, mode="clip")',
            f'jnp.take($0, $1, {d}, mode="fill", fill_value=0)',
            f'jnp.take($0, $1, {d}, mode="wrap")',
        ]
    )
    g.emit("take", text, [x, i], bound=f.bound, grid=f.grid)


def index(g: Builder) -> None:
    """Several index arrays combined with plain slices."""
    x = g.number(2, 4)
    f = g.facts[x]
    i = _indices(g, 1)
    a, b = f.shape[:2]
    text = g.choice(
        [
            f"$0[$1 % {a}]",
            f"$0[$1 % {a}, $1 % {b}]",
            f"$0[:, $1 % {b}]",
            f"$0[$1 % {a}, :{max(1, b // 2)}]",
            f"$0[$1[0] % {a}]",
        ]
    )
    g.emit("gather", text, [x, i], bound=f.bound, grid=f.grid)


def along(g: Builder) -> None:
    x = g.number(1, 3)
    f, d = g.facts[x], g.dim(x)
    shape = tuple(g.size() if e == d else n for e, n in enumerate(f.shape))
    i = g.pick(lambda o: o.type == Type(shape=shape, dtype="int32"), lambda: Type(shape=shape, dtype="int32"))
    g.emit("take_along_axis", f"jnp.take_along_axis($0, $1 % {f.shape[d]}, {d})", [x, i], bound=f.bound, grid=f.grid)


def scatter(g: Builder) -> None:
    """`x.at[i]`: add (out-of-range indices are dropped), or set without duplicate indices."""
    x = g.number(1, 3)
    f = g.facts[x]
    i = _indices(g, 1)
    n, length = f.shape[0], g.facts[i].shape[0]
    kind = Type(shape=(length, *f.shape[1:]), dtype=f.type.dtype)
    y = g.pick(lambda o: o.type == kind, lambda: kind)
    h = g.facts[y]
    grid = max(f.grid, h.grid) if f.grid is not None and h.grid is not None else None
    op = g.choice(["add", "add", "set", "max", "mul"])
    if op == "add":
        text = g.choice([f"$0.at[$1 % {n}].add($2)", '$0.at[$1].add($2, mode="drop")'])
        g.emit("scatter-add", text, [x, i, y], bound=f.bound + length * h.bound, grid=grid)
    elif op == "set" and length <= n:
        text = f"$0.at[(jnp.argsort($1) + $1[0]) % {n}].set($2)"
        g.emit("scatter", text, [x, i, y], bound=max(f.bound, h.bound), grid=grid)
    elif op == "max" and f.exact and h.exact:
        text = f"lax.stop_gradient($0).at[$1 % {n}].max(lax.stop_gradient($2))"
        g.emit("scatter-max", text, [x, i, y], bound=max(f.bound, h.bound), grid=grid)
    elif op == "mul" and f.type.dtype == "F":
        text = f"lax.stop_gradient($0).at[$1 % {n}].mul(jnp.cos(lax.stop_gradient($2)))"
        g.emit("scatter-mul", text, [x, i, y], bound=f.bound)
    else:
        raise SkipOp


def segment(g: Builder) -> None:
    x = g.number(1, 3)
    f = g.facts[x]
    kind = Type(shape=f.shape[:1], dtype="int32")
    i = g.pick(lambda o: o.type == kind, lambda: kind)
    m = g.size()
    g.emit(
        "segment_sum",
        f"jax.ops.segment_sum($0, $1 % {m}, num_segments={m})",
        [x, i],
        bound=f.shape[0] * f.bound,
        grid=f.grid,
    )


def dynamic_slice(g: Builder) -> None:
    x = g.any(1, 4)
    f = g.facts[x]
    i = g.int(0, 0) if g.chance(0.5) else _indices(g, 1)
    at = "$1" if not g.facts[i].ndim else "$1[0]"
    sizes = [n if g.chance(0.5) else g.rng.randint(1, n) for n in f.shape]
    starts = [at if n != s else "jnp.int32(0)" for n, s in zip(f.shape, sizes, strict=True)]
    text = f"lax.dynamic_slice($0, ({', '.join(starts)},), {tuple(sizes)})"
    if "$1" not in text:
        raise SkipOp
    g.emit("dynamic_slice", text, [x, i], bound=f.bound, grid=f.grid)


def dynamic_update_slice(g: Builder) -> None:
    x = g.number(1, 3)
    f = g.facts[x]
    sizes = tuple(n if g.chance(0.5) else g.rng.randint(1, n) for n in f.shape)
    kind = Type(shape=sizes, dtype=f.type.dtype)
    y = g.pick(lambda o: o.type == kind, lambda: kind)
    i = g.int(0, 0)
    if sizes == f.shape:
        raise SkipOp
    starts = ", ".join("$2" if n != s else "jnp.int32(0)" for n, s in zip(f.shape, sizes, strict=True))
    h = g.facts[y]
    grid = max(f.grid, h.grid) if f.grid is not None and h.grid is not None else None
    text = f"lax.dynamic_update_slice($0, $1, ({starts},))"
    g.emit("dynamic_update_slice", text, [x, y, i], bound=max(f.bound, h.bound), grid=grid)


def one_hot(g: Builder) -> None:
    i = g.int(0, 2)
    n = g.size()
    g.emit("one_hot", f"jax.nn.one_hot($0 % {n}, {n}, dtype=F)", [i], bound=1, grid=0)


def in_batches(g: Builder) -> None:
    """A gather, dynamic slice or scatter with batch dims of operand and indices: by vmap, or by a counting index."""
    x = g.number(2, 3)
    f = g.facts[x]
    n, m = f.shape[:2]
    i = g.pick(
        lambda o: o.type == Type(shape=(n,), dtype="int32"),
        lambda: Type(shape=(n,), dtype="int32"),
    )
    k = g.rng.randint(1, m)
    text = g.choice(
        [
            f"jax.vmap(lambda a, j: a[j % {m}])($0, $1)",
            f"jax.vmap(lambda a, j: lax.dynamic_slice_in_dim(a, j, {k}))($0, $1)",
            f"jax.vmap(lambda a, j: a.at[j % {m}].set(1))($0, $1)",
            f"jax.vmap(lambda a, j: a.at[j % {m}].add(a[0]))($0, $1)",
            f"$0[jnp.arange({n}), $1 % {m}]",
            f"jnp.swapaxes($0, 0, 1)[$1 % {m}, jnp.arange({n})]",
            f"$0.at[jnp.arange({n}), $1 % {m}].set(1)",
            f"$0.at[jnp.arange({n}), $1].add($0[:, 0])",
        ]
    )
    grid = None if f.grid is None else max(f.grid, 0)
    g.emit("gather in batches", text, [x, i], bound=2 * f.bound + 1, grid=grid)


def search(g: Builder) -> None:
    """Ops that JAX builds of sorts, cumulative sums and gathers, with results of a given size."""
    x = g.exact(1, 3)
    f, size = g.facts[x], g.size()
    op, text, bound, grid = g.choice(
        [
            ("nonzero", f"jnp.nonzero($0 > 1, size={size}, fill_value=-1)[0].astype(jnp.int32)", 8, None),
            ("where", f"jnp.where($0.ravel() > 0, size={size}, fill_value=0)[0].astype(jnp.int32)", f.size, None),
            ("unique", f"jnp.unique($0, size={size}, fill_value=0)", f.bound, f.grid),
            ("unique counts", f"jnp.unique($0, size={size}, return_counts=True)[1].astype(jnp.int32)", f.size, None),
            ("histogram", "jnp.histogram($0, bins=4, range=(-2, 2))[0].astype(jnp.int32)", f.size, None),
            ("bincount", "jnp.bincount(jnp.abs($0).ravel().astype(jnp.int32) % 5, length=5)", f.size, None),
            ("searchsorted", "jnp.searchsorted(jnp.sort($0.ravel()), $0).astype(jnp.int32)", f.size, None),
            ("digitize", "jnp.digitize($0, jnp.array([-1, 0, 1], $0.dtype)).astype(jnp.int32)", 3, None),
        ]
    )
    if f.type.dtype == "H" or (op == "bincount" and f.type.dtype != "int32"):
        raise SkipOp
    g.emit(op, text if op != "bincount" else f"{text}.astype(jnp.int32)", [x], bound=bound, grid=grid)


OPS = {
    take: 4,
    index: 3,
    along: 2,
    scatter: 5,
    segment: 2,
    dynamic_slice: 3,
    dynamic_update_slice: 3,
    one_hot: 2,
    in_batches: 3,
    search: 4,
}
"""Op -> relative frequency."""
