"""Contractions, reductions, windows, sorts, random numbers, linear algebra."""

from __future__ import annotations

import math

from .builder import Builder, Facts, SkipOp
from .case import Type


def product(g: Builder) -> None:
    """An einsum of two arrays: each dim of the first is batch, free or contracted."""
    x = g.float(1, 4)
    f = g.facts[x]
    left = "ijkl"[: f.ndim]
    roles = [g.choice("bfcc") for _ in left]
    shared = [(c, n) for c, n, r in zip(left, f.shape, roles, strict=True) if r in "bc"]
    free = [(c, g.size()) for c in "mn"[: g.choice([0, 1, 1, 2])]]
    right = [*shared, *free]
    g.rng.shuffle(right)
    kind = Type(shape=tuple(n for _, n in right), dtype=f.type.dtype)
    y = g.pick(lambda o: o.type == kind, lambda: kind)
    out = [c for c, r in zip(left, roles, strict=True) if r in "bf"] + [c for c, _ in free]
    g.rng.shuffle(out)
    text = f'jnp.einsum("{left},{"".join(c for c, _ in right)}->{"".join(out)}", $0, $1)'
    summed(g, "dot_general", text, [x, y], math.prod(n for n, r in zip(f.shape, roles, strict=True) if r == "c"))


def summed(g: Builder, op: str, text: str, operands: list[int], terms: int) -> int:
    """An op whose result sums that many products of its operands."""
    facts = [g.facts[v] for v in operands]
    bound = terms * math.prod(f.bound for f in facts)
    return g.emit(op, text, operands, bound=bound, grid=_sum([f.grid for f in facts]))


def _sum(grids: list[int | None]) -> int | None:
    return None if None in grids else sum(n for n in grids if n is not None)


def matmul(g: Builder) -> None:
    x = g.float(2, 4)
    f = g.facts[x]
    kind = Type(shape=(*f.shape[:-2], f.shape[-1], g.size()), dtype=f.type.dtype)
    y = g.pick(lambda o: o.type == kind, lambda: kind)
    summed(g, "dot_general", "$0 @ $1", [x, y], f.shape[-1])


def convolution(g: Builder) -> None:
    """A convolution: one or two spatial dims, any dim order, strides, padding, dilation, feature or batch groups."""
    x = g.float(3, 4, wanted=lambda f: f.type.dtype == "F")
    f = g.facts[x]
    space = f.ndim - 2
    order = list(range(f.ndim))
    g.rng.shuffle(order)
    batch, features = f.shape[order[0]], f.shape[order[1]]
    groups = g.choice([k for k in (1, 1, 2, features) if features % k == 0])
    batches = g.choice([k for k in (1, 1, 1, 2) if batch % k == 0]) if groups == 1 else 1
    kernel = [g.choice([1, 2, 3]) for _ in range(space)]
    shape = (*kernel, features // groups, groups * batches * g.choice([1, 2, 4]))
    y = g.pick(lambda o: o.type == Type(shape=shape, dtype="F"), lambda: Type(shape=shape, dtype="F"))
    letters = "NC" + "HW"[:space]
    lhs = "".join(letters[order.index(d)] for d in range(f.ndim))
    out = list(letters)
    g.rng.shuffle(out)
    spec = f'("{lhs}", "{"HW"[:space]}IO", "{"".join(out)}")'
    dilated = tuple(g.choice([1, 1, 1, 2]) for _ in range(space))
    rhs_dilated = tuple(g.choice([1, 1, 1, 2]) for _ in range(space))
    padding = g.choice(['"SAME"', '"VALID"', str(tuple(g.choice([(1, 1), (0, 2), (1, 0)]) for _ in range(space)))])
    if padding == '"SAME"':
        dilated = (1,) * space
    spatial = [f.shape[order[2 + i]] for i in range(space)]
    for n, k, a, b in zip(spatial, kernel, dilated, rhs_dilated, strict=True):
        if padding != '"SAME"' and (n - 1) * a + 1 < (k - 1) * b + 1:
            raise SkipOp
    options = f"lhs_dilation={dilated}, rhs_dilation={rhs_dilated}"
    options += f", feature_group_count={groups}, batch_group_count={batches}"
    strides = tuple(g.choice([1, 1, 2]) for _ in range(space))
    if padding != '"SAME"' and max(dilated) > 1:
        strides = (1,) * space  # JAX has no shape rule for "VALID" with both
        padding = "((1, 1),)" if space == 1 else "((1, 1), (1, 1))"
    text = f"lax.conv_general_dilated($0, $1, {strides}, {padding}, dimension_numbers={spec}, {options})"
    summed(g, "conv_general_dilated", text, [x, y], math.prod(kernel) * shape[-2])


def pool(g: Builder) -> None:
    kind = g.choice(["add", "max", "min"])
    x = g.float(1, 4, exact=kind != "add")
    f = g.facts[x]
    if f.type.dtype != "F":
        raise SkipOp
    window = tuple(min(n, g.choice([1, 2, 3])) for n in f.shape)
    strides = tuple(g.choice([1, 1, 2]) for _ in window)
    padding = g.choice(['"SAME"', '"VALID"', str(tuple((0, min(1, w - 1)) for w in window))])
    start = {"add": "0.0", "max": "-jnp.inf", "min": "jnp.inf"}[kind]
    text = f"lax.reduce_window($0, {start}, lax.{kind}, {window}, {strides}, {padding})"
    terms = math.prod(window) if kind == "add" else 1
    g.emit(f"reduce_window_{kind}", text, [x], bound=terms * f.bound, grid=f.grid)


def total(g: Builder) -> None:
    """Sums and ops derived from sums."""
    x = g.float(1)
    f, dims = g.facts[x], g.dims(x)
    n = math.prod(f.shape[d] for d in dims)
    keep = g.choice(["", ", keepdims=True"])
    op = g.choice(["sum", "sum", "mean", "var", "logsumexp"])
    if op == "sum":
        g.emit("reduce_sum", f"jnp.sum($0, {dims}{keep})", [x], bound=n * f.bound, grid=f.grid)
    elif op == "logsumexp":
        g.emit("logsumexp", f"jax.nn.logsumexp($0, {dims}{keep})", [x], bound=f.bound + math.log(n))
    else:
        g.emit(op, f"jnp.{op}($0, {dims}{keep})", [x], bound=f.bound ** (2 if op == "var" else 1))


def extreme(g: Builder) -> None:
    x = g.exact(1)
    f, dims, keep = g.facts[x], g.dims(x), g.choice(["", ", keepdims=True"])
    op = g.choice(["max", "min"])
    g.emit(f"reduce_{op}", f"jnp.{op}($0, {dims}{keep})", [x], bound=f.bound, grid=f.grid)


def times(g: Builder) -> None:
    x = g.float(1)
    g.emit("reduce_prod", f"jnp.prod(jnp.cos($0), {g.dims(x)})", [x], bound=1)


def truth(g: Builder) -> None:
    x = g.pick(lambda f: f.type.dtype == "bool" and f.ndim > 0, lambda: Type(shape=g.shape(1, 3), dtype="bool"))
    op = g.choice(["any", "all"])
    g.emit(f"reduce_{op}", f"jnp.{op}($0, {g.dims(x)})", [x])


def bitwise(g: Builder) -> None:
    x = g.int(1)
    dims = g.dims(x)
    op, name = g.choice([("lax.bitwise_xor", "reduce_xor"), ("jnp.add", "reduce_sum")])
    grow = math.prod(g.facts[x].shape[d] for d in dims) if name == "reduce_sum" else 2
    g.emit(name, f"lax.reduce($0, jnp.int32(0), {op}, {dims})", [x], bound=2 + grow * g.facts[x].bound)


def argextreme(g: Builder) -> None:
    x = g.exact(1)
    d = g.dim(x)
    op = g.choice(["argmax", "argmin"])
    g.emit(op, f"jnp.{op}($0, {d}).astype(jnp.int32)", [x], bound=g.facts[x].shape[d])


def cumulative(g: Builder) -> None:
    op = g.choice(["cumsum", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
    x = g.exact(1) if op in ("cummax", "cummin") else g.float(1)
    f, d, back = g.facts[x], g.dim(x), g.choice(["", ", reverse=True"])
    n = f.shape[d]
    if op == "cumsum":
        g.emit(op, f"lax.cumsum($0, {d}{back})", [x], bound=n * f.bound, grid=f.grid)
    elif op == "cumprod":
        g.emit(op, f"lax.cumprod(jnp.sin($0), {d}{back})", [x], bound=1)
    elif op == "cumlogsumexp":
        g.emit(op, f"lax.cumlogsumexp($0, {d}{back})", [x], bound=f.bound + 3)
    else:
        g.emit(op, f"lax.{op}($0, {d}{back})", [x], bound=f.bound, grid=f.grid)


def sort(g: Builder) -> None:
    x = g.exact(1)
    f, d = g.facts[x], g.dim(x)
    op = g.choice(["sort", "argsort", "sort by key"])
    if op == "sort":
        g.emit(op, f"jnp.sort($0, {d})", [x], bound=f.bound, grid=f.grid)
    elif op == "argsort":
        g.emit(op, f"jnp.argsort($0, {d}).astype(jnp.int32)", [x], bound=f.shape[d])
    else:
        y = g.like(x)
        text = f"lax.sort(($0, $1), dimension={d}, num_keys=1)"

        def facts(kind: Type) -> Facts:  # the first result has the facts of the key, and both share bounds
            grids = [f.grid, g.facts[y].grid]
            return g.checked(kind, max(f.bound, g.facts[y].bound), None if None in grids else max(grids))

        g.emit_all(op, text, [x, y], facts)


def top(g: Builder) -> None:
    x = g.exact(1)
    f = g.facts[x]
    k = g.rng.randint(1, f.shape[-1])
    text = f"lax.top_k($0, {k})"
    g.emit_all("top_k", text, [x], lambda kind: Facts(type=kind, bound=max(f.bound, f.shape[-1]), grid=_grid(kind, f)))


def _grid(kind: Type, f: Facts) -> int | None:
    return f.grid if kind.dtype == f.type.dtype else None


def normalized(g: Builder) -> None:
    x = g.float(1)
    d = g.dim(x)
    op, text, bound = g.choice(
        [
            ("softmax", f"jax.nn.softmax($0, {d})", 1),
            ("log_softmax", f"jax.nn.log_softmax($0, {d})", 12),
            (
                "layer_norm",
                f"($0 - jnp.mean($0, {d}, keepdims=True)) * lax.rsqrt(jnp.var($0, {d}, keepdims=True) + 0.5)",
                6,
            ),
        ]
    )
    g.emit(op, text, [x], bound=bound)


def random_numbers(g: Builder) -> None:
    key = g.pick(lambda f: f.type.dtype == "key" and f.ndim == 0, lambda: Type(shape=(), dtype="key"))
    shape = g.shape(1, 3)
    op = g.choice(["normal", "uniform", "bernoulli", "randint", "permutation"])
    if op == "permutation":
        text = f"jax.random.permutation($0, {g.size()}).astype(jnp.int32)"
        g.emit(op, text, [key], bound=8)
        return
    text, bound = {
        "normal": (f"jnp.tanh(jax.random.normal($0, {shape}, F))", 1),
        "uniform": (f"jax.random.uniform($0, {shape}, F)", 1),
        "bernoulli": (f"jax.random.bernoulli($0, 0.5, {shape})", 1),
        "randint": (f"jax.random.randint($0, {shape}, 0, 8, jnp.int32)", 8),
    }[op]
    g.emit(f"random {op}", text, [key], bound=bound)


def keys(g: Builder) -> None:
    """Key splitting, and random numbers from an array of keys."""
    key = g.pick(lambda f: f.type.dtype == "key" and f.ndim < 2, lambda: Type(shape=g.choice([(), (4,)]), dtype="key"))
    ndim = g.facts[key].ndim
    op = g.choice(["split", "fold_in", "key_data"])
    if op == "split" and not ndim:
        g.emit("random split", f"jax.random.split($0, {g.choice([2, 4])})", [key])
    elif op == "fold_in" and not ndim:
        g.emit("random fold_in", "jax.random.fold_in($0, 3)", [key])
    elif ndim:
        text = f"jax.vmap(lambda k: jax.random.uniform(k, ({g.size()},), F))($0)"
        g.emit("random batch", text, [key], bound=1)
    else:
        g.emit("random key_data", "(jax.random.key_data($0) % 8).astype(jnp.int32)", [key], bound=8)


def fourier(g: Builder) -> None:
    x = g.float(1, 4, wanted=lambda f: f.type.dtype == "F")
    f, d = g.facts[x], g.dim(x)
    op = g.choice(["fft", "rfft", "ifft"])
    n = f.shape[d]
    back = g.choice(["real", "imag"])
    text = f"jnp.{back}(jnp.fft.{op}($0, axis={d}))"
    if op == "rfft" and g.chance(0.5):
        text = f"jnp.fft.irfft(jnp.fft.rfft($0, axis={d}), {n}, axis={d})"
    g.emit("fft", text, [x], bound=n * f.bound)


def linear_algebra(g: Builder) -> None:
    x = g.float(2, 3, wanted=lambda f: f.type.dtype == "F" and f.shape[-1] * f.shape[-2] <= 64)
    f = g.facts[x]
    n, m = f.shape[-2:]
    one = f"jnp.eye({n}, dtype=F).reshape({(1,) * (f.ndim - 2) + (n, n)})"
    square = f"(jnp.einsum('...ij,...kj->...ik', $0, $0) * {1 / m} + {one})"
    op = g.choice(["cholesky", "triangular_solve"])
    if op == "cholesky":
        g.emit(op, f"jnp.linalg.cholesky({square})", [x], bound=5)
        return
    kind = Type(shape=(*f.shape[:-2], n, g.size()), dtype="F")
    y = g.pick(lambda o: o.type == kind, lambda: kind)
    text = f"lax.linalg.triangular_solve(jnp.linalg.cholesky({square}), $1, left_side=True, lower=True)"
    g.emit(op, text, [x, y], bound=g.facts[y].bound * n)


OPS = {
    product: 8,
    matmul: 6,
    convolution: 4,
    pool: 3,
    total: 6,
    extreme: 2,
    times: 1,
    truth: 1,
    bitwise: 1,
    argextreme: 2,
    cumulative: 3,
    sort: 2,
    top: 1,
    normalized: 3,
    random_numbers: 2,
    keys: 1,
    fourier: 1,
    linear_algebra: 1,
}
"""Op -> relative frequency."""
