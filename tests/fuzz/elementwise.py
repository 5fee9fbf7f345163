"""Elementwise ops, casts, selects."""

from __future__ import annotations

from .builder import Builder, SkipOp

SMOOTH = {
    "tanh": ("jnp.tanh($0)", 1),
    "sin": ("jnp.sin($0)", 1),
    "cos": ("jnp.cos($0)", 1),
    "logistic": ("jax.nn.sigmoid($0)", 1),
    "exp": ("jnp.exp($0 * 0.25)", 2.8),
    "exp2": ("jnp.exp2($0 * 0.25)", 2),
    "expm1": ("jnp.expm1($0 * 0.25)", 2),
    "log": ("jnp.log($0 * $0 + 1)", 3),
    "log1p": ("jnp.log1p($0 * $0)", 3),
    "sqrt": ("jnp.sqrt($0 * $0 + 1)", 4.2),
    "rsqrt": ("lax.rsqrt($0 * $0 + 0.5)", 1.5),
    "cbrt": ("jnp.cbrt($0 * $0 + 1)", 3),
    "erf": ("lax.erf($0)", 1),
    "erfc": ("lax.erfc($0)", 2),
    "atan": ("jnp.arctan($0)", 1.6),
    "asinh": ("jnp.arcsinh($0)", 2.1),
    "sinh": ("jnp.sinh($0 * 0.25)", 1.2),
    "cosh": ("jnp.cosh($0 * 0.25)", 1.6),
    "tan": ("jnp.tan($0 * 0.25)", 1.6),
    "gelu": ("jax.nn.gelu($0)", 4),
    "silu": ("jax.nn.silu($0)", 4),
    "softplus": ("jnp.logaddexp($0, 0)", 4.1),
    "reciprocal": ("1 / (1 + $0 * $0)", 1),
    "lgamma": ("lax.lgamma($0 * $0 + 1.5) * 0.125", 4),
}
"""Op -> (text, bound of its result)."""

BROKEN = {
    "abs": "jnp.abs($0)",
    "relu": "jax.nn.relu($0)",
    "sign": "jnp.sign($0)",
    "floor": "jnp.floor($0)",
    "ceil": "jnp.ceil($0)",
    "round": "jnp.round($0)",
    "clamp": "lax.clamp(-0.5, $0, 1.5)",
    "is_finite": "jnp.isfinite($0)",
}
"""Discontinuous or non-differentiable ops."""

COMPARE = ("==", "!=", "<", "<=", ">", ">=")


def unary(g: Builder) -> None:
    name = g.choice(list(SMOOTH))
    text, bound = SMOOTH[name]
    x = g.float()
    g.emit(name, text if "*" in text or "/" in text else text, [x], bound=bound)


def kinked(g: Builder) -> None:
    name = g.choice(list(BROKEN))
    x = g.float(exact=True)
    text, f = BROKEN[name], g.facts[x]
    if f.type.dtype == "H" and name == "clamp":
        raise SkipOp
    g.emit(name, text, [x], bound=max(f.bound, 1.5 if name == "clamp" else 1), grid=f.grid)


def negated(g: Builder) -> None:
    x = g.number()
    f = g.facts[x]
    g.emit("neg", "-$0", [x], bound=f.bound, grid=f.grid)


def power(g: Builder) -> None:
    x = g.float()
    f = g.facts[x]
    n = g.choice([2, 3])
    g.emit("integer_pow", f"$0 ** {n}", [x], bound=f.bound**n, grid=None if f.grid is None else f.grid * n)


def binary(g: Builder) -> None:
    x = g.float()
    y = g.like(x)
    a, b = g.facts[x], g.facts[y]
    both = a.exact and b.exact
    op = g.choice(["add", "sub", "mul", "mul", "div", "pow", "atan2", "hypot"])
    if op in ("add", "sub"):
        grid = max(a.grid, b.grid) if both else None
        g.emit(op, f"$0 {'+' if op == 'add' else '-'} $1", [x, y], bound=a.bound + b.bound, grid=grid)
    elif op == "mul":
        g.emit(op, "$0 * $1", [x, y], bound=a.bound * b.bound, grid=a.grid + b.grid if both else None)
    elif op == "div":
        g.emit(op, "$0 / (1 + $1 * $1)", [x, y], bound=a.bound)
    elif op == "pow":
        g.emit(op, "(1 + $0 * $0) ** jnp.sin($1)", [x, y], bound=1 + a.bound**2)
    elif op == "atan2":
        g.emit(op, "jnp.arctan2($0, 1 + $1 * $1)", [x, y], bound=1.6)
    else:
        g.emit(op, "jnp.sqrt(1 + $0 * $0 + $1 * $1)", [x, y], bound=6)


def extremes(g: Builder) -> None:
    x = g.exact()
    y = g.like(x, exact=True)
    a, b = g.facts[x], g.facts[y]
    op = g.choice(["maximum", "minimum"])
    grid = max(a.grid, b.grid) if a.grid is not None and b.grid is not None else None
    g.emit(op[:3], f"jnp.{op}($0, $1)", [x, y], bound=max(a.bound, b.bound), grid=grid)


def compare(g: Builder) -> None:
    x = g.exact()
    y = g.like(x, exact=True)
    op = g.choice(COMPARE)
    text = f"$0 {op} $1" if g.chance(0.7) else f"$0 {op} 1"
    g.emit("compare", text, [x, y] if "$1" in text else [x])


def select(g: Builder) -> None:
    x = g.any()
    f = g.facts[x]
    y = g.like(x)
    which = g.pick(lambda o: o.type.dtype == "bool" and o.shape == f.shape, lambda: _boolean(g, f.shape))
    h = g.facts[y]
    grid = max(f.grid, h.grid) if f.grid is not None and h.grid is not None else None
    text = "jnp.where($2, $0, $1)"
    if f.type.dtype in ("F", "int32") and g.chance(0.3):
        text = "jnp.where($1, $0, 0)"
        return void(g.emit("select", text, [x, which], bound=f.bound, grid=f.grid))
    g.emit("select", text, [x, y, which], bound=max(f.bound, h.bound), grid=grid)


def _boolean(g: Builder, shape):
    from .case import Type

    return Type(shape=shape, dtype="bool")


def void(_: object) -> None:
    """Discards its argument."""


def integer(g: Builder) -> None:
    x = g.int()
    y = g.like(x)
    a, b = g.facts[x].bound, g.facts[y].bound
    op, bound = g.choice(
        [
            ("$0 + $1", a + b),
            ("$0 - $1", a + b),
            ("$0 * $1", a * b),
            ("$0 // (1 + jnp.abs($1))", a + 1),
            ("$0 % (1 + jnp.abs($1))", b + 1),
            ("lax.rem($0, 1 + jnp.abs($1))", b + 1),
        ]
    )
    g.emit("integer arithmetic", op, [x, y], bound=bound)


def bits(g: Builder) -> None:
    x = g.int()
    y = g.like(x)
    top = 2 * max(g.facts[x].bound, g.facts[y].bound) + 2
    op, bound = g.choice(
        [
            ("$0 & $1", top),
            ("$0 | $1", top),
            ("$0 ^ $1", top),
            ("~$0 + 0 * $1", top),
            ("($0 << 2) + $1", 4 * top + top),
            ("($0 >> 1) + $1", 2 * top),
            ("lax.shift_right_logical(jnp.abs($0), jnp.ones_like($0)) + $1", 2 * top),
            ("lax.population_count($0) + $1", 32 + top),
            ("lax.clz($0) + $1", 32 + top),
        ]
    )
    g.emit("bits", op, [x, y], bound=bound)


def logic(g: Builder) -> None:
    x = g.pick(lambda f: f.type.dtype == "bool", lambda: _boolean(g, g.shape(1, 3)))
    y = g.like(x)
    g.emit("logic", g.choice(["$0 & $1", "$0 | $1", "$0 ^ $1", "~$0 | $1"]), [x, y])


def cast(g: Builder) -> None:
    """Between floats, integers and bools, exactly."""
    x = g.any()
    f = g.facts[x]
    kind = f.type.dtype
    if kind == "int32" and f.bound <= 100 and g.chance(0.2):
        g.emit("cast", "$0.astype(jnp.int8).astype(jnp.int32)", [x], bound=f.bound)
    elif kind in ("int32", "bool"):
        g.emit("cast", "$0.astype(F)", [x], bound=f.bound, grid=0)
    elif kind == "H":
        g.emit("cast", "$0.astype(F)", [x], bound=f.bound, grid=f.grid)
    elif kind == "F" and f.exact and g.chance(0.6):
        g.emit("cast", "($0 * 4).astype(jnp.int32)", [x], bound=4 * f.bound + 1)
    elif kind == "F" and g.chance(0.5):
        g.emit("cast", "$0.astype(H)", [x], bound=f.bound * 1.01, grid=f.grid)
    else:
        raise SkipOp


def bitcast(g: Builder) -> None:
    x = g.int(high=3)
    if g.chance(0.5):
        g.emit("bitcast", "(lax.bitcast_convert_type($0, jnp.uint32) % 50).astype(jnp.int32)", [x], bound=50)
    else:
        g.emit("bitcast", "lax.bitcast_convert_type($0, jnp.int8).astype(jnp.int32)", [x], bound=128)


def constant(g: Builder) -> None:
    """An expression without operands, so each device creates its own shard."""
    x = g.float(1)
    shape = g.facts[x].shape
    d = g.dim(x)
    text, bound, grid = g.choice(
        [
            (f"lax.broadcasted_iota(F, {shape}, {d}) * 0.125", 8, 3),
            (f"jnp.full({shape}, 0.5, F)", 0.5, 1),
            (f"jnp.ones({shape}, F)", 1, 0),
            (f"jnp.cos(lax.broadcasted_iota(F, {shape}, {d}))", 1, None),
        ]
    )
    f = g.facts[x]
    if f.type.dtype != "F":
        raise SkipOp
    if g.chance(0.5):
        g.emit("constant", text, [], bound=bound, grid=grid)
    else:
        both = grid is not None and f.grid is not None
        g.emit("constant", f"$0 + {text}", [x], bound=f.bound + bound, grid=max(grid, f.grid) if both else None)


def annotate(g: Builder) -> None:
    x = g.pick(lambda f: True)
    f = g.facts[x]
    name = f"n{len(g.facts)}"
    if g.chance(0.15):
        text, spec = f'annotate($0, name="{name}")', None
    else:
        more = ", priority=1" if g.chance(0.1) else ""
        text, spec = f'annotate($0, $s, name="{name}"{more})', g.spec(f.shape, divides=False)
    g.emit("annotate", text, [x], bound=f.bound, grid=f.grid, spec=spec)


def barrier(g: Builder) -> None:
    x = g.pick(lambda f: True)
    way = g.choice(["forward", "backward", "none"])
    g.emit("barrier", f'sharding.barrier($0, "{way}")', [x], bound=g.facts[x].bound, grid=g.facts[x].grid)


def same(g: Builder) -> None:
    """A sharding group of values without annotations, so that annotations in it cannot conflict."""
    x = g.float(0, 4, wanted=lambda f: f.type.dtype == "F")
    y = g.like(x)
    bound = max(g.facts[x].bound, g.facts[y].bound)
    g.emit("same", "0.5 * sum(sharding.same($0 * 1, $1 * 1))", [x, y], bound=bound)


OPS = {
    unary: 10,
    kinked: 3,
    negated: 1,
    power: 2,
    binary: 10,
    extremes: 2,
    compare: 2,
    select: 3,
    integer: 2,
    bits: 2,
    logic: 1,
    cast: 3,
    bitcast: 1,
    constant: 3,
    annotate: 14,
    barrier: 1,
    same: 2,
}
"""Op -> relative frequency."""
