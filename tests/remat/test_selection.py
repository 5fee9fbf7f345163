"""`remat.select`: as few FLOPs run again as the best of all choices, and the bytes that JAX keeps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.peak_memory import floats, newest_jax_only

import sharding
from sharding import compat, cost, remat
from sharding.remat.linearized_program import linearized, saved_bytes
from sharding.remat.selection import Policy
from sharding.remat.selection_solvers import SOLVERS, plan


def attention(x, p):
    h = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    scores = jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).T)
    return x + checkpoint_name(scores @ (h @ p["v"]), "attention") @ p["o"]


def layer(x, p):
    x = attention(x, p)
    return x + checkpoint_name(jax.nn.gelu(x @ p["up"]), "gelu") @ p["down"]


def shapes(rows=32, size=16, hidden=64):
    square = {name: floats(size, size) for name in "qkvo"}
    return floats(rows, size), square | {"up": floats(size, hidden), "down": floats(hidden, size)}


def small(x, w1, w2):
    h = jnp.sin(checkpoint_name(x @ w1, "product"))
    return jnp.exp(h @ w2) * h[:, :3]


SMALL = floats(5, 4), floats(4, 6), floats(6, 3)


@jax.custom_jvp
def steep(x):
    return jnp.sin(x)


@steep.defjvp
def steep_jvp(primals, tangents):
    """A product that only the derivative has, and two things made of it: one may be saved and the other run again."""
    (x,), (t,) = primals, tangents
    product = x @ x
    return steep(x), t * jnp.cos(product) + t * jnp.tanh(product + x)


def derivative_only(x, w):
    return steep(x @ w) * 2.0


RECTANGLES = floats(6, 5), floats(5, 6)


def keys_of(program):
    return list(dict.fromkeys(op.key for op in program.ops if op.is_saveable))


def test_exact_equals_brute_force():
    program = linearized(small, *SMALL)
    keys = keys_of(program)
    assert 5 <= len(keys) <= 10
    subsets = itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1))
    plans = [plan(program, subset) for subset in subsets]
    for limit in sorted({one.num_bytes for one in plans}):
        found = SOLVERS["exact"](program, keys, limit)
        assert found.num_bytes <= limit
        assert found.flops == min(one.flops for one in plans if one.num_bytes <= limit)


KINDS = ["times", "product", "sin", "tanh", "power"]


def branching(seed):
    """A random program of products and elementwise functions, some with a derivative of several ops; its arguments."""
    random = np.random.default_rng(seed)
    widths, steps = [3], []
    for _ in range(5):
        source = int(random.integers(max(0, len(widths) - 3), len(widths)))
        same = [k for k, width in enumerate(widths) if width == widths[source] and k != source]
        kind = random.choice(KINDS if same else KINDS[1:])
        steps.append((str(kind), source, int(random.choice(same)) if kind == "times" else 0))
        widths.append(int(random.choice([2, 7, 20])) if kind == "product" else widths[source])
    factors = [floats(widths[k], n) for (kind, k, _), n in zip(steps, widths[1:], strict=True) if kind == "product"]

    def fun(x, *factors):
        values, left = [x], list(factors)
        for kind, k, other in steps:
            one = values[k]
            functions = {"product": lambda v=one: v @ left.pop(0), "times": lambda v=one, o=other: v * values[o]}
            functions |= {
                "sin": lambda v=one: jnp.sin(v),
                "tanh": lambda v=one: jnp.tanh(v),
                "power": lambda v=one: v**3,
            }
            values.append(functions[kind]())
        return sum(v.sum() for v in values[-2:])

    return fun, (floats(4, 3), *factors)


@pytest.mark.parametrize("seed", range(8))
def test_exact_equals_brute_force_on_branching_programs(seed):
    fun, args = branching(seed)
    program = linearized(fun, *args)
    keys = keys_of(program)
    assert len(keys) <= 12
    subsets = itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1))
    plans = [plan(program, subset) for subset in subsets]
    limits = sorted({one.num_bytes for one in plans})
    for limit in limits[:: -(-len(limits) // 6)]:
        found = SOLVERS["exact"](program, keys, limit)
        assert found.num_bytes <= limit
        assert found.flops == min(one.flops for one in plans if one.num_bytes <= limit)


@pytest.mark.parametrize(("fun", "args"), [(small, SMALL), (layer, shapes())], ids=["small", "layer"])
def test_bytes_and_flops_are_those_of_jax(fun, args):
    """What the traced derivative keeps and runs, for each budget, against what the plan says."""
    most = saved_bytes(fun, *args)
    plain = flops_of_gradient(fun, args)
    for share in (0, 0.1, 0.3, 0.6, 1):
        s = remat.select(fun, *args, memory_bytes=share * most)
        assert s.saved_bytes == plan(linearized(fun, *args), s.policy.saved).num_bytes
        assert s.saved_bytes <= share * most
        again = flops_of_gradient(jax.checkpoint(fun, policy=s.policy), args) - plain
        assert again == pytest.approx(s.flops)


@pytest.mark.parametrize(("fun", "args"), [(small, SMALL), (derivative_only, RECTANGLES)], ids=["small", "derivative"])
def test_any_choice_takes_what_jax_takes(fun, args):
    """Also bad ones: what is saved may have to run forward for that alone, and again for something else."""
    program, plain = linearized(fun, *args), flops_of_gradient(fun, args)
    keys, seen = keys_of(program), set()
    for number in (1, 2, len(keys)):
        for saved in itertools.combinations(keys, number):
            expected = plan(program, saved)
            again = flops_of_gradient(jax.checkpoint(fun, policy=Policy(frozenset(saved))), args) - plain
            assert again == pytest.approx(expected.flops)
            seen.add(expected.flops)
    assert len(seen) >= 3


def flops_of_gradient(fun, args):
    """FLOPs of the traced program of loss and gradients, without dead code."""
    value = jax.value_and_grad(lambda *args: fun(*args).sum(), argnums=tuple(range(len(args))))
    jaxpr = compat.open_jaxpr(jax.make_jaxpr(value)(*args))
    return live_flops(jaxpr, {v for v in jaxpr.outvars if not compat.is_literal(v)})


def live_flops(jaxpr, live):
    total = 0
    for eqn in reversed(jaxpr.eqns):
        if not live & set(eqn.outvars):
            continue
        live |= {v for v in eqn.invars if not compat.is_literal(v)}
        bodies = [compat.open_jaxpr(body) for _, _, body in compat.sub_jaxprs(eqn.params)]
        if bodies:
            (body,) = bodies
            total += live_flops(body, {v for v in body.outvars if not compat.is_literal(v)})
        elif eqn.primitive.name != "reduce_precision":  # JAX marks saved values with it, which costs nothing
            arrays = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
            total += cost.work(eqn.primitive.name, *arrays, eqn.params).flops
    return total


def test_flops_fall_with_bytes_and_greedy_is_never_better():
    args, before = shapes(), float("inf")
    most = saved_bytes(layer, *args)
    for share in np.linspace(0, 1, 9):
        exact, greedy = (
            remat.select(layer, *args, memory_bytes=share * most, algorithm=name) for name in ("exact", "greedy")
        )
        assert max(exact.saved_bytes, greedy.saved_bytes) <= share * most
        assert exact.flops <= min(greedy.flops, before)
        before = exact.flops
    assert before == 0
    assert remat.select(layer, *args, memory_bytes=0).flops == exact.most_flops


def test_gradients_do_not_change():
    args = jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size, dtype="float32")).reshape(a.shape), shapes())
    s = remat.select(layer, *args, memory_bytes=10_000)
    a, b = (
        jax.jit(jax.grad(lambda x, p, f=f: (f(x, p) ** 2).sum(), argnums=(0, 1)))(*args)
        for f in (layer, jax.checkpoint(layer, policy=s.policy))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), a, b)


def test_by_name():
    args = shapes()
    s = remat.select(layer, *args, memory_bytes=10**9, names=["attention", "gelu"])
    assert s.names == ("attention", "gelu")
    by_name = jax.checkpoint_policies.save_only_these_names(*s.names)
    assert s.saved_bytes == saved_bytes(jax.checkpoint(layer, policy=by_name), *args)
    one = remat.select(layer, *args, memory_bytes=3_000, names=["attention", "gelu"])
    assert one.names == ("attention",)


def test_unknown_names():
    with pytest.raises(sharding.ShardingError, match=r"no value named 'atention'[\s\S]*did you mean 'attention'\?"):
        remat.select(layer, *shapes(), memory_bytes=1, names=["atention"])


@pytest.mark.parametrize("options", [{"memory_bytes": "1GB"}, {"memory_bytes": 1e6, "algorithm": "best"}], ids=str)
def test_invalid_options(options):
    with pytest.raises(sharding.ShardingError, match=r"(a number of bytes|'exact' or 'greedy')"):
        remat.select(jnp.sin, jnp.ones(3), **options)


def test_negative_limit():
    with pytest.raises(sharding.ShardingError, match=r"at least 0 bytes[\s\S]*memory_bytes=0"):
        remat.select(layer, *shapes(), memory_bytes=-1)


def test_loops_within_the_limit():
    """A loop in the function: its stacked values count as JAX keeps them."""

    def stack(x, ws):
        x = jnp.sin(x)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)
        return jnp.cos(x)

    args = floats(8, 16), floats(6, 16, 16)
    for limit in (0, 1000, 5000, 10**6):
        s = remat.select(stack, *args, memory_bytes=limit)
        assert s.saved_bytes == saved_bytes(jax.checkpoint(stack, policy=s.policy), *args) <= limit


def test_integer_and_unused_arguments():
    def pick(table, ids, unused):
        return jnp.tanh(table[ids]) ** 2

    s = remat.select(pick, floats(10, 4), jax.ShapeDtypeStruct((7,), "int32"), floats(3), memory_bytes=10**6)
    assert s.flops == 0
    assert s.saved_bytes > 0


def test_table():
    s = remat.select(layer, *shapes(), memory_bytes=10**9, names=["gelu"])
    assert str(s).splitlines()[0].startswith("saves 8.19 kB, runs ")
    name, saved, count, num_bytes, _, source = s.rows()[0]
    assert (name, saved, count, num_bytes) == ("gelu", "saved", 1, 4 * 32 * 64)
    assert source.startswith("test_selection.py:")
    assert "<table" in s._repr_html_()


@newest_jax_only
def test_compiled_memory_of_a_scan_falls_with_the_limit():
    x, p = shapes(512, 64, 256)
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((8, *a.shape), a.dtype), p)

    def temporary(limit):
        body = layer
        if limit is not None:
            body = jax.checkpoint(layer, policy=remat.select(layer, x, p, memory_bytes=limit).policy)
        loss = lambda p, x: (jax.lax.scan(lambda x, p: (body(x, p), None), x, p)[0] ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(stacked, x).compile().memory_analysis().temp_size_in_bytes

    most = saved_bytes(layer, x, p)
    low, middle, high, plain = temporary(0), temporary(most / 4), temporary(most), temporary(None)
    assert low < middle < high
    assert middle - low == pytest.approx(8 * remat.select(layer, x, p, memory_bytes=most / 4).saved_bytes, rel=0.1)
    assert low < plain / 2
