"""Equal equations become one, collectives over dims reductions; nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import sharding
from sharding import P
from sharding.jit.simplification import simplify

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, 4)


def count(jaxpr, name):
    """Equations of one primitive, in all bodies."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    bodies = [b for eqn in inner.eqns for p in eqn.params.values() for b in (p if isinstance(p, tuple) else (p,))]
    return sum(e.primitive.name == name for e in inner.eqns) + sum(count(b, name) for b in bodies if hasattr(b, "eqns"))


def twice(x):
    return jnp.sin(x) * jnp.sum(jnp.sin(x)) + jnp.sum(jnp.sin(x))


def in_a_scan(x):
    return jax.lax.scan(lambda c, row: (c + jnp.sin(row) * jnp.sin(row), jnp.sin(row)), jnp.zeros(4), x)


def in_a_branch(x):
    return jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x) + jnp.sin(x), lambda: jnp.sin(x))


def with_constants(x):
    return (x + 1.0) * (x + 1.0) + (x + 2.0) + (x + jnp.float32(1.0)).astype(jnp.int32)


def of_other_types(x):
    return jax.lax.convert_element_type(x, jnp.int32) + jax.lax.convert_element_type(x, jnp.int8)


def over_a_vmapped_axis(x):
    def normalized(row):
        return row - jax.lax.pmean(row, "rows"), jax.lax.pmax(row, "rows"), jax.lax.psum((row, 2 * row), "rows")

    return jax.vmap(normalized, axis_name="rows")(x)


def a_dot_of_flattened_arrays(x):
    flat = jnp.ravel(x)
    return jnp.vdot(x, jnp.sin(x)), flat * 2, jnp.dot(flat, jnp.ravel(x.T))


def a_vmapped_while(x):
    def grown(row, limit):
        return jax.lax.while_loop(lambda c: jnp.sum(c[0]) < limit, lambda c: (c[0] + 1.0, c[1] + 1), (row, 0))

    return jax.vmap(grown)(x, jnp.array([1.0, 50.0, -9.0]))


def a_twice_vmapped_while(x):
    def grown(key, one):
        key = jax.random.key(key)
        state = jax.lax.while_loop(
            lambda c: c[0] < 2.0, lambda c: (c[0] + 0.7, jax.random.fold_in(c[1], 1)), (one, key)
        )
        return state[0], jax.random.uniform(state[1])

    return jax.vmap(jax.vmap(grown, (None, 0)))(jnp.arange(3), x)


def of_empty_arrays(x):
    """The gradient of a product with weights of inputs that a model does not have, as of a filter without controls."""

    def loss(x, w):
        return jnp.sum(jnp.sin(x)) + jnp.sum(jnp.zeros((3, 0)) @ w.T @ jnp.ones((4, 2)))

    return jax.grad(loss, (0, 1))(x, jnp.zeros((4, 0)))


def with_a_scanned_zero(x):
    """Each iteration adds to a zero that is made outside of the loop, by a sum over no dims."""
    zero = jnp.sum(0.0)

    def body(total, row):
        return total + jax.lax.reduce_sum_p.bind(zero + row, axes=(), out_sharding=None), zero

    return jax.lax.scan(body, jnp.zeros(4), x)


PROGRAMS = [
    a_dot_of_flattened_arrays,
    a_twice_vmapped_while,
    a_vmapped_while,
    in_a_branch,
    in_a_scan,
    of_empty_arrays,
    of_other_types,
    over_a_vmapped_axis,
    twice,
    with_a_scanned_zero,
    with_constants,
]


@pytest.mark.parametrize("f", PROGRAMS)
def test_values_are_the_same(f):
    closed = jax.make_jaxpr(f)(X)
    expected = jax.tree.leaves(f(X))
    found = jax.core.eval_jaxpr(*_parts(simplify(closed)), X)
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def _parts(closed):
    return getattr(closed, "jaxpr", closed), closed.consts


@pytest.mark.parametrize(("f", "name", "left"), [(twice, "sin", 1), (twice, "reduce_sum", 1), (in_a_scan, "sin", 1)])
def test_equal_equations_are_one(f, name, left):
    assert count(simplify(jax.make_jaxpr(f)(X)), name) == left


def all_finite(x):
    """What `tree_reduce(logical_and, ..., True)` does, and its opposite."""
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x).all(), (x < 9).all()], jnp.array(True))
    return finite, functools.reduce(jnp.logical_or, [(x > 1).any(), (x < 0).any()], jnp.array(False))


def decided(x):
    return (x > 1).any() & jnp.array(False), (x > 1).any() | jnp.array(True), x[0].astype(int) & jnp.int32(1)


@pytest.mark.parametrize(("f", "num_joined"), [(all_finite, 2), (decided, 3)])
def test_what_conditions_that_always_hold_are_joined_with_stays_as_it_is(f, num_joined):
    closed = jax.make_jaxpr(f)(X)
    simple = simplify(closed)
    assert count(simple, "and") + count(simple, "or") == num_joined
    found = jax.core.eval_jaxpr(*_parts(simple), X)
    for a, b in zip(found, f(X), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("kind", "num_zeros"), [(AxisType.Auto, 1), (AxisType.Explicit, 2)])
def test_a_sharding_over_axes_that_are_auto_says_nothing(kind, num_zeros):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,))
    replicated = NamedSharding(mesh, P(None, None))

    def zeros(x):
        placed = jax.lax.broadcast_in_dim(jnp.float32(0), x.shape, (), out_sharding=replicated)
        return jnp.sin(placed), jnp.cos(jnp.zeros(x.shape))

    with jax.set_mesh(mesh):
        assert count(simplify(jax.make_jaxpr(zeros)(X)), "broadcast_in_dim") == num_zeros


def squares(x):
    return jnp.sum(x**2), jnp.sum(jnp.square(x)), jnp.sum(x * x)


def of_real_parts(x):
    return jnp.sum(x**2), jnp.sum(jnp.real(x) ** 2 + jnp.imag(x) ** 2)


def swapped(x):
    y = jnp.sin(x)
    return jnp.sum(x + y), jnp.sum(y + x)


def inside_of_a_call(x):
    norm = jax.jit(lambda x: jnp.sqrt(jnp.sum(x**2)))
    return jnp.sum(x * x), jnp.sqrt(jnp.sum(jnp.square(x))), norm(x)


def partly_in_a_call(x):
    shifted = jax.jit(lambda x: x - jnp.sum(x**2))
    return jnp.sum(x * x), shifted(x)


def partly_in_a_call_before(x):
    return partly_in_a_call(x)[::-1]


def in_two_calls(x):
    shifted, scaled = jax.jit(lambda x: x - jnp.sum(x**2)), jax.jit(jax.jit(lambda x: x * jnp.sum(x**2)))
    return scaled(x), shifted(x)


IN_CALLS = [inside_of_a_call, partly_in_a_call, partly_in_a_call_before, in_two_calls]


@pytest.mark.parametrize("f", [squares, of_real_parts, swapped, *IN_CALLS])
def test_equal_values_are_computed_once(f):
    closed = jax.make_jaxpr(f)(X)
    simple = simplify(closed)
    assert count(closed, "reduce_sum") > count(simple, "reduce_sum") == 1
    found = jax.core.eval_jaxpr(*_parts(simple), X)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(f(X)), found, strict=True))


def test_calls_of_one_body_that_recomputes_differ():
    block = jax.jit(jax.checkpoint(jnp.sin))
    closed = jax.make_jaxpr(lambda x: block(x) - block(2 * x))(X)
    found = jax.core.eval_jaxpr(*_parts(simplify(closed)), X)
    np.testing.assert_array_equal(found[0], jnp.sin(X) - jnp.sin(2 * X))


def test_gradients_of_integers():
    loss = jax.value_and_grad(jax.jit(lambda x, n: jnp.sum(x) * n), argnums=(0, 1), allow_int=True)
    simplify(jax.make_jaxpr(lambda x, n: jax.tree.map(lambda g: g.shape, loss(x, n)[1]) and loss(x, n)[0])(X, 3))


def test_custom_derivatives_are_not_equal():
    @jax.custom_jvp
    def straight_through(x):
        return jnp.round(x)

    straight_through.defjvp(lambda xs, ts: (jnp.round(*xs), *ts))
    closed = jax.make_jaxpr(lambda x: straight_through(x) + jnp.round(x))(X)
    assert count(simplify(closed), "round") == 2


def test_without_repetition_it_is_the_same_object():
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x))(X)
    assert simplify(closed) is closed


def test_other_parameters_are_not_equal():
    closed = jax.make_jaxpr(of_other_types)(X)
    assert count(simplify(closed), "convert_element_type") == count(closed, "convert_element_type")


def test_barriers_and_recomputation_stay():
    def f(x):
        once, again = jax.lax.optimization_barrier(x), jax.lax.optimization_barrier(x)
        block = jax.checkpoint(jnp.sin)
        return once + again + block(x) + block(x)

    merged = simplify(jax.make_jaxpr(f)(X))
    name = "checkpoint" if count(merged, "checkpoint") else "remat2"
    assert count(merged, "optimization_barrier") == 2 and count(merged, name) == 2


def test_effects_stay(capfd):
    def f(x):
        jax.debug.print("seen")
        jax.debug.print("seen")
        return x

    closed = jax.make_jaxpr(f)(X)
    assert len(_parts(simplify(closed))[0].eqns) == len(_parts(closed)[0].eqns)


def test_names_stay():
    def f(x):
        return sharding.annotate(jnp.sin(x), name="one") + sharding.annotate(jnp.sin(x), name="two")

    with sharding.mesh(data=8):
        completion = sharding.jit(f, in_shardings=P("data")).complete(jax.ShapeDtypeStruct((8, 4), "float32"))
    assert completion.spec("one") == completion.spec("two") == P("data")


def test_a_norm_that_is_used_twice_is_reduced_once():
    def f(grads):
        updates, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        return updates, optax.tree.norm(grads)

    shapes = [jax.ShapeDtypeStruct((16, 16), "float32")] * 3
    with sharding.mesh(data=2, tensor=4):
        jitted = sharding.jit(f, in_shardings=([P("data", "tensor")] * 3,))
        completion = jitted.complete(shapes)
        compiled = sharding.cost.read_compiled(jitted.lower(shapes).compile())
    assert compiled.by_kind() == completion.communication().lowered("cpu").by_kind() == {"all-reduce": (6, 24)}


def test_a_mean_is_reduced_once_with_the_deviations_around_it():
    def normalized(x):
        return (x - x.mean()) / (x.std() + 1e-6)

    x = jax.ShapeDtypeStruct((64, 16), "float32")
    with sharding.mesh(data=8):
        jitted = sharding.jit(normalized, in_shardings=P("data"))
        ledger = jitted.complete(x).communication()
        compiled = sharding.cost.read_compiled(jitted.lower(x).compile())
    assert compiled.by_kind() == ledger.lowered("cpu").by_kind() == {"all-reduce": (2, 8)}
    assert all(c.source.startswith("test_simplification.py:") for c in ledger)


def test_a_sum_over_a_vmapped_axis_is_reduced_over_its_mesh_axis():
    with sharding.mesh(data=8):
        jitted = sharding.jit(over_a_vmapped_axis, in_shardings=P("data"))
        x = jax.ShapeDtypeStruct((64, 16), "float32")
        completion = jitted.complete(x)
        compiled = sharding.cost.read_compiled(jitted.lower(x).compile())
    assert not completion.unknown
    assert compiled.by_kind() == completion.communication().lowered("cpu").by_kind()


def test_a_scalar_of_each_device_becomes_an_array():
    with sharding.mesh(data=8):

        def sums(x):
            return jax.shard_map(lambda x: jnp.sum(x)[None], in_specs=P("data"), out_specs=P("data"))(x)

        found = sharding.jit(sums, in_shardings=P("data"))(np.ones((64, 4), np.float32))
    np.testing.assert_array_equal(found, np.full(8, 32, np.float32))


def test_a_vdot_leaves_its_arrays_sharded():
    def f(x, y):
        return jnp.vdot(x, y)

    x = jax.ShapeDtypeStruct((64, 32), "float32")
    with sharding.mesh(data=2, tensor=4):
        jitted = sharding.jit(f, in_shardings=(P("data", "tensor"), P("data", "tensor")))
        completion = jitted.complete(x, x)
        compiled = sharding.cost.read_compiled(jitted.lower(x, x).compile())
    assert set(completion.communication().by_kind()) == {"all-reduce"}
    assert compiled.by_kind() == completion.communication().lowered("cpu").by_kind()


def test_a_vmapped_while_has_one_condition():
    def fn(x):
        return jax.vmap(lambda row: jax.lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c * 2, row))(x)

    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(fn, in_shardings=P("data", "tensor"))
        x = jnp.linspace(0.1, 1.0, 8 * 16).reshape(8, 16)
        found = step.complete(x).verify(step.lower(x).compile())
        assert found.agrees and len(found.predicted) == 1  # two sums over tensor an iteration, one `any` over data
        np.testing.assert_array_equal(step(x), jax.jit(fn)(x))


@pytest.mark.parametrize(
    "fn",
    [lambda c, x: jnp.where(c, x, x), lambda c, x: jnp.maximum(x, x) + 1, lambda c, x: jax.lax.select(c, x, x)],
    ids=["where", "maximum", "select"],
)
def test_a_choice_between_a_value_and_itself_is_the_value(fn):
    args = (jax.ShapeDtypeStruct((8, 8), "bool"), jax.ShapeDtypeStruct((8, 8), "float32"))
    simple = simplify(jax.make_jaxpr(fn)(*args))
    assert not any(count(simple, name) for name in ("select_n", "max"))
    with sharding.mesh(data=2, tensor=4):
        jitted = sharding.jit(fn, in_shardings=(P("data"), P("tensor")), out_shardings=P("tensor"))
        predicted = jitted.complete(*args).communication().lowered("cpu").by_kind()
        compiled = sharding.cost.read_compiled(jitted.lower(*args).compile()).by_kind()
        c, x = np.arange(64).reshape(8, 8) % 3 == 0, np.arange(64, dtype=np.float32).reshape(8, 8)
        np.testing.assert_array_equal(jitted(c, x), fn(c, x))
    assert compiled == predicted == {}


def test_kernels_of_one_element_are_not_turned():
    """The gradient of a convolution turns its kernel, and would gather it once more."""

    def f(x, w):
        return jax.grad(lambda x: (jax.lax.conv(x, w, (1, 1), "SAME") ** 2).sum())(x)

    x = np.ones((2, 3, 8, 8), np.float32)
    for size, left in ((1, 0), (3, 1)):
        assert count(simplify(jax.make_jaxpr(f)(x, np.ones((3, 3, size, size), np.float32))), "rev") == left


def by_platform(x, **others):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, tpu=jnp.cos, **others)


@pytest.mark.parametrize(
    ("platform", "others", "left"),
    [
        ("cpu", {}, "sin"),
        ("tpu", {}, "cos"),
        ("cpu", {"default": jnp.tan}, "sin"),
        ("tpu", {"default": jnp.tan}, "cos"),
        ("cuda", {"default": jnp.tan}, "tan"),
        ("cuda", {}, None),  # JAX says what is missing when it lowers it
        ("cuda", {"cuda": jnp.exp, "default": jnp.tan}, "exp"),
    ],
)
def test_only_the_branch_of_the_platform_is_left(platform, others, left):
    jaxpr = jax.make_jaxpr(lambda x: by_platform(jnp.log(x), **others))(X)
    simple = simplify(jaxpr, platform)
    names = {name for name in ("sin", "cos", "tan", "exp") if count(simple, name)}
    assert names == ({left} if left else {"sin", "cos"})
    assert count(simple, "cond") == (left is None)
    if left:
        (found,) = jax.core.eval_jaxpr(getattr(simple, "jaxpr", simple), simple.consts, X + 2)
        np.testing.assert_allclose(found, getattr(jnp, left)(jnp.log(X + 2)))


def test_what_is_overwritten_whole_is_what_is_written():
    def f(x):
        return jax.lax.dynamic_update_slice(jnp.zeros_like(x), jnp.sin(x), (jnp.argmax(x[0]), 0))

    jaxpr = jax.make_jaxpr(f)(X)
    assert count(jaxpr, "dynamic_update_slice") == 1
    assert count(simplify(jaxpr), "dynamic_update_slice") == 0
    np.testing.assert_array_equal(jax.jit(f)(X), jnp.sin(X))
    with sharding.mesh({"a": 1}, devices=jax.devices()[:1]):
        np.testing.assert_array_equal(sharding.jit(f)(X), jax.jit(f)(X))


def test_products_without_elements_are_made_of_nothing():
    jaxpr = jax.make_jaxpr(of_empty_arrays)(X)
    empty = [e for e in getattr(simplify(jaxpr), "jaxpr", jaxpr).eqns if any(v.aval.size == 0 for v in e.outvars)]
    assert any(e.primitive.name == "dot_general" and e.outvars[0].aval.size == 0 for e in jaxpr.jaxpr.eqns)
    assert empty
    assert not any(e.primitive.name == "dot_general" for e in empty)


def test_a_loop_has_its_own_zero():
    simple = simplify(jax.make_jaxpr(with_a_scanned_zero)(X))
    (scan,) = (e for e in getattr(simple, "jaxpr", simple).eqns if e.primitive.name == "scan")
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])
    assert not any(e.primitive.name == "reduce_sum" for e in body.eqns)
    reads = {v for e in body.eqns for v in e.invars if not isinstance(v, jax.extend.core.Literal)}
    assert not any(v.aval.shape == () for v in reads)


def test_sums_to_a_zero_from_outside_are_reduced_behind_the_loop():
    """As the log-determinants of a flow's layers are."""

    def f(x):
        return with_a_scanned_zero(jnp.sum(x, -1))[0]

    x = jax.ShapeDtypeStruct((6, 4, 64), "float32")
    with sharding.mesh({"data": 8}):
        ledger = sharding.jit(f, in_shardings=P(None, None, "data")).complete(x).communication().lowered("gpu")
    assert ledger.by_kind()["all-reduce"][0] == 1
