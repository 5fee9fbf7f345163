"""`jax.Ref`s in a program, and as its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def accumulated(x):
    total = jax.new_ref(jnp.zeros(8))

    def add(i, carry):
        total[...] += x[i] * 2
        return carry

    jax.lax.fori_loop(0, 8, add, 0)
    return total[...]


def test_ref_inside():
    step = sharding.jit(accumulated, in_shardings=P(None, "tensor"))
    np.testing.assert_allclose(step(X), X.sum(axis=0) * 2, rtol=1e-5, atol=1e-5)
    assert step(X).sharding.spec == P("tensor")


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
def test_ref_in_a_function_with_a_derivative_rule_of_its_own(rule):
    @(jax.custom_jvp if rule == "jvp" else jax.custom_vjp)
    def doubled(x):
        ref = jax.new_ref(x)
        ref[0] = x[1]
        return ref[...] * 2

    if rule == "jvp":
        doubled.defjvp(lambda xs, ts: (doubled(*xs), 2 * ts[0]))
    else:
        doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (2 * ct,))

    def step(x):
        return jax.lax.scan(lambda c, row: (c + doubled(row), None), x[0], x)[0]

    rows = np.concatenate([X[:, 1:2], X[:, 1:]], axis=1)
    y = sharding.jit(step, in_shardings=P("data", "tensor"))(X)
    np.testing.assert_allclose(y, X[0] + 2 * rows.sum(axis=0), rtol=1e-5, atol=1e-5)


def test_ref_as_argument():
    def step(state, x):
        state["total"][...] += x.sum(axis=0)
        return x * state["total"][...][None]

    jitted, state = sharding.jit(step), {"total": jax.new_ref(jnp.zeros(8)), "unused": jax.new_ref(jnp.ones(3))}
    for _ in range(2):
        y = jitted(state, X)
    np.testing.assert_allclose(state["total"][...], X.sum(axis=0) * 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, X * X.sum(axis=0) * 2, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state["unused"][...], np.ones(3))


def test_the_shardings_of_the_result_are_those_without_refs():
    def step(total, x):
        total[...] += x.sum(axis=0)
        return {"y": x * 2}

    completion = sharding.jit(step, in_shardings=(None, P("data"))).complete(jax.new_ref(jnp.zeros(8)), X)
    assert completion.out_shardings == {"y": P("data")}


def test_ref_of_an_enclosing_trace():
    inner = sharding.jit(lambda total, x: total.__setitem__(..., total[...] + x))

    @jax.jit
    def outer(x):
        total = jax.new_ref(jnp.zeros(8))
        inner(total, x[0])
        inner(total, x[1])
        return total[...]

    np.testing.assert_allclose(outer(X), X[0] + X[1], rtol=1e-6)


def test_ref_closed_over():
    total = jax.new_ref(jnp.zeros(8))

    def step(x):
        total[...] += x.sum(axis=0)
        return x * 2

    jitted = sharding.jit(step)
    for _ in range(2):
        np.testing.assert_allclose(jitted(X), X * 2)
    np.testing.assert_allclose(total[...], X.sum(axis=0) * 2, rtol=1e-5, atol=1e-5)


def test_a_ref_closed_over_on_other_devices_is_an_error():
    """On some devices of the mesh alone, or on others: JAX cannot run it, and its error names no array."""
    start = jax.device_put(jnp.zeros(8), jax.devices()[0])
    for sizes, count in (({"data": 8}, 8), ({"data": 2}, 2), ({"data": 1}, 1)):
        with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])):
            total = jax.new_ref(start)
        devices = jax.devices()[:count] if count > 1 else jax.devices()[1:2]
        with sharding.mesh(sizes, devices=devices):
            step = sharding.jit(lambda x, total=total: total[...] + x)
            with pytest.raises(sharding.ShardingError, match="on other devices than the mesh"):
                step(X[0])
    with sharding.mesh(data=1, devices=jax.devices()[:1]):
        np.testing.assert_allclose(sharding.jit(lambda x: total[...] + x)(X[0]), X[0])


def test_a_ref_argument_on_other_devices_is_an_error():
    start = jax.device_put(jnp.zeros(8), jax.devices()[0])
    with jax.set_mesh(jax.make_mesh((1,), ("one",), devices=jax.devices()[:1])):
        ref = jax.new_ref(start)
    with (
        sharding.mesh(data=8),
        pytest.raises(sharding.ShardingError, match=r"(?s)step_of_refs\(state/total\).*other devices"),
    ):
        sharding.jit(step_of_refs)({"total": ref}, X[0])


def step_of_refs(state, x):
    state["total"][...] += x


def test_a_ref_that_comes_in_twice_is_an_error():
    ref = jax.new_ref(jnp.zeros(8))
    with pytest.raises(sharding.ShardingError, match="b is the mutable array that is also a"):
        sharding.jit(lambda a, b: a[...] + b[...])(ref, ref)
    with pytest.raises(sharding.ShardingError, match="a is the mutable array that is closed over"):
        sharding.jit(lambda a: a[...] + ref[...])(ref)


def assert_close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def in_scan(total, x):
    def step(carry, row):
        total[1] = total[0] + jnp.tanh(row)
        return carry + row, total[1]

    return jax.lax.scan(step, x[0], x)


def in_while(total, x):
    def step(i):
        total[i] += x[i] * total[0]
        return i + 2

    return jax.lax.while_loop(lambda i: (i < 8) & (x[0, 0] < 9), step, 0)


def in_cond(total, x):
    def step(carry, row):
        def written():
            total[2] = row
            return row * 2

        return carry, jax.lax.cond(row[0] > 0, written, lambda: total[2] + row)

    return jax.lax.scan(step, 0, x)


@pytest.mark.parametrize("body", [in_scan, in_while, in_cond])
@pytest.mark.parametrize("has_own", [True, False], ids=["own", ""])
def test_a_loop_in_a_nested_jit_writes_a_ref_of_the_enclosing_program(body, has_own):
    def program(jit):
        def outer(x):
            total = jax.new_ref(x * 0.5)

            def inner(x):
                own = jax.new_ref(x) if has_own else x
                y = body(total, sharding.annotate(x, P("data", "tensor")))
                return y, own[...]

            return jit(inner)(x), total[...]

        return outer

    expected = jax.jit(program(jax.jit))(X)
    for jit in (jax.jit, sharding.jit):
        assert_close(jit(program(sharding.jit))(X), expected)


@pytest.mark.parametrize("body", [in_scan, in_while, in_cond])
def test_a_loop_writes_a_ref_that_is_closed_over(body):
    found = []
    for jit in (jax.jit, sharding.jit):
        total = jax.new_ref(jnp.ones((8, 8)))
        step = jit(lambda x, total=total: body(total, x))
        found.append((step(X), step(X * 2), total[...]))
    assert_close(*found)
