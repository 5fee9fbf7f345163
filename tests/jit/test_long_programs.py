"""Programs of thousands of ops, and bodies nested deeply: all that a completion says grows with the program alone."""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support.call_counts import calls_by_function, num_calls

import sharding
from sharding import P

X, W = jax.ShapeDtypeStruct((16, 64), "float32"), jax.ShapeDtypeStruct((64, 64), "float32")


def chain(n):
    def f(x, w):
        for i in range(n):
            x = x @ w if i % 3 else jnp.tanh(x)
        return x

    return f, (X, W)


def gradient_of_chain(n):
    f, args = chain(n)
    return jax.grad(lambda x, w: f(x, w).sum(), argnums=1), args


def wide(n):
    return lambda xs, w: [jnp.tanh(x @ w) for x in xs], ([X] * n, W)


def wide_sum(n):
    return lambda x, w: functools.reduce(jnp.add, [x * float(i) for i in range(n)]) @ w, (X, W)


def conflicts(n):
    def f(x, w):
        for i in range(n):
            spec = (P("data"), P(None, "data"), P("tensor"))[i % 3]
            x = jnp.tanh(sharding.annotate(x, spec, name="h"))
        return x @ w

    return f, (X, W)


def loops(n):
    def f(x, w):
        for _ in range(n):
            x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)
            x = lax.while_loop(lambda c: c.sum() < 3, lambda c: jnp.tanh(c @ w), x)
        return x

    return f, (X, W)


def gathers(n):
    def f(x, w):
        for i in range(n):
            x = x.at[i % 16].set(x[(i * 3) % 16] + 1.0)
        return x @ w

    return f, (X, W)


def layers_of_three_products(n):
    def f(x, layers):
        for a, b, c in layers:
            x = x + (x @ a) * (x @ b) * (x @ c)
        return x

    return f, (X, [(W, W, W)] * n)


def callbacks(n):
    def f(x, w):
        for _ in range(n):
            x = jax.pure_callback(lambda x: x, X, x) @ w
        return x

    return f, (X, W)


def carried_leaves(n):
    def f(x, w):
        return lax.scan(lambda c, row: ([p - row[0] * p for p in c], None), [w] * n, x)[0]

    return f, (X, W)


def shard_maps(n):
    def product(x, w):
        return lax.psum(x @ w, "tensor")

    def f(x, w):
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        for _ in range(n):
            x = jax.shard_map(product, **specs, check_vma=False)(x, w)
        return x

    return f, (X, W)


def inside_shard_map(n):
    def body(x, w):
        for i in range(n):
            x = jnp.tanh(x @ w) if i % 3 else lax.psum(x, "tensor")
        return x

    def f(x, w):
        return jax.shard_map(body, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)(x, w)

    return f, (X, W)


def updates(n):
    def f(x, leaves):
        norm = jnp.sqrt(sum((p * p).sum() for p, _ in leaves))
        return [(p - p / norm * x[0, 0], 0.9 * m + p) for p, m in leaves]

    return f, (X, [(W, W)] * n)


def nested(inside, around):
    """Programs of n bodies, each in the next."""

    def program(n):
        def f(x, w):
            body = functools.partial(inside, w)
            for k in range(n):
                body = around(body, k)
            return body(x)

        return f, (X, W)

    return program


def product(w, c):
    return jnp.tanh(c @ w)


def jit_of(body, k):
    return jax.jit(lambda c: body(c) * 1.5)


def cond_of(body, k):
    return lambda c: lax.cond(c[0, 0] > k, body, lambda c: c * 2, c)


def scan_of(body, k):
    return lambda c: lax.scan(lambda c, _: (body(c), None), c, None, length=2)[0]


nested_jits, nested_conds, nested_scans = (nested(product, around) for around in (jit_of, cond_of, scan_of))


def deep_tree(n):
    tree = X
    for i in range(n):
        tree = {"a": tree} if i % 2 else [tree]
    return lambda t, w: jax.tree.map(lambda x: x @ w, t), (tree, W)


def many_names(n):
    params = {f"layers_{i}": {"w": X, "b": X} for i in range(n // 2)}
    return lambda params, w: jax.tree.map(lambda x: x @ w, params), (params, W)


def uses(program, n, path):
    """Name -> a function that does one thing with the completed program."""
    f, args = program(n)
    jitted = sharding.jit(f, in_shardings=(P("data"), P(None, "tensor")))
    completed = []
    yield "complete", lambda: completed.append(jitted.complete(*args))
    (c,) = completed
    first, *_, last = c.assignment.graph.names
    yield from {
        "memory": lambda: (str(c.memory()), c.memory()._repr_html_()),
        "memory of a GPU": lambda: c.memory(platform="gpu").peak_bytes,
        "communication": lambda: (str(c.communication()), c.communication().lowered("gpu")._repr_html_()),
        "estimate": lambda: str(c.estimate("h100")),
        "compile time": lambda: str(c.compile_time()),
        "html": c._repr_html_,
        "report": lambda: c.report(path),
        "text": lambda: (str(c), str(c.conflicts), str(c.unknown), c.unreduced, c.uneven),
        "why": lambda: (str(c.why(first)), str(c.why(last))),
        "draw": lambda: (str(c.draw()), c.draw()._repr_html_()),
        "explicit": lambda: str(c.explicit()),
        "lock": c.locked,
    }.items()


def work(program, n, path):
    """Name of a use -> its number of calls."""
    with sharding.mesh(data=2, tensor=4):
        return {name: num_calls(use) for name, use in uses(program, n, path)}


FLAT = {
    f.__name__: (f, n)
    for f, n in [
        (chain, 60), (gradient_of_chain, 40), (wide, 60), (wide_sum, 60), (conflicts, 60), (loops, 15), (gathers, 20),
        (many_names, 40),
    ]
}  # fmt: skip
NESTED = {
    name: (f, n) for name, f, n in [("jits", nested_jits, 30), ("conds", nested_conds, 24), ("scans", nested_scans, 14)]
}


def superlinear(program, n, path):
    """The uses that do more than twice the work for twice the program, each with the ratio."""
    half, whole = (work(program, k, path) for k in (n, 2 * n))
    return {use: whole[use] / half[use] for use in half if whole[use] > 2.15 * half[use]}


@pytest.mark.parametrize("name", NESTED)
def test_work_grows_with_the_depth_of_nested_bodies(name, tmp_path):
    assert not superlinear(*NESTED[name], tmp_path / "report.html")


@pytest.mark.parametrize("program", [conflicts, gathers])
def test_work_grows_with_the_number_of_ops(program, tmp_path):
    assert not superlinear(program, 40, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("program", "n"),
    [
        (wide, 60), (gradient_of_chain, 40), (layers_of_three_products, 16), (loops, 12), (callbacks, 30),
        (carried_leaves, 40), (shard_maps, 30), (inside_shard_map, 120), (updates, 30),
    ],
)  # fmt: skip
def test_no_function_is_called_more_than_in_proportion(program, n, tmp_path):
    path = tmp_path / "report.html"
    with sharding.mesh(data=2, tensor=4):
        for use in uses(program, 2, path):
            calls_by_function(use[1])  # what happens once, such as imports
        half, whole = (
            {(name, *one): k for name, use in uses(program, size, path) for one, k in calls_by_function(use).items()}
            for size in (n, 2 * n)
        )
    assert not {one: (half.get(one, 0), k) for one, k in whole.items() if k > max(6 * n, 3 * half.get(one, 0))}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAT)
def test_ten_thousand_ops(name, tmp_path):
    program, n = FLAT[name]
    with sharding.mesh(data=2, tensor=4):
        f, args = program(n)
        ops = len(sharding.jit(f).complete(*args).assignment.graph.ops)
    many = 10_000 * n // ops
    assert not superlinear(program, many // 2, tmp_path / "report.html")


@pytest.mark.parametrize("program", [nested_jits, nested_conds, nested_scans, deep_tree])
def test_no_recursion_error_at_a_depth_that_jax_traces(program, tmp_path):
    work(program, 30, tmp_path / "report.html")


@pytest.mark.slow
@pytest.mark.parametrize("program", [nested_jits, nested_conds, deep_tree])
def test_nested_500_deep(program, tmp_path):
    f, args = program(500)
    found = []

    def run():
        try:
            jax.jit(f).lower(*args)
        except RecursionError:
            found.append(None)  # Python 3.12 limits recursion through C beside its own limit
            return
        found.append(work(program, 500, tmp_path / "report.html"))

    before, size = sys.getrecursionlimit(), threading.stack_size(2**30)
    sys.setrecursionlimit(100_000)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(before)
        threading.stack_size(size)
    if found == [None]:
        pytest.skip("jax.jit does not lower it")
    assert found
