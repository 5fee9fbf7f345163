"""`same`: one spec for all members under every JAX transformation, and an error for conflicting annotations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate, compat, same

U = P.UNCONSTRAINED
X, Y = (np.sin(np.arange(64, dtype=np.float32) + n).reshape(8, 8) for n in (0, 1))


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def groups(jaxpr):
    """The number of members of every group in a jaxpr and its sub-jaxprs."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        found += [len(eqn.invars)] if eqn.primitive.name == "same" else []
        for _, _, inner in compat.sub_jaxprs(eqn.params):
            found += groups(inner)
    return found


def traced(f, *args):
    return groups(jax.make_jaxpr(f)(*args))


def pair(x, y):
    a, b = same(jnp.sin(x), jnp.cos(y))
    return a * b


def scanned(x, y):
    return jax.lax.scan(lambda c, _: (pair(c, y), None), x, None, length=3)[0]


def branched(x, y):
    return jax.lax.cond(x[0, 0] > 0, pair, jnp.multiply, x, y)


EVERYWHERE = [pair, scanned, branched, jax.jit(pair), jax.checkpoint(pair)]


@pytest.mark.parametrize("f", EVERYWHERE)
def test_group_survives_tracing(f):
    assert traced(f, X, Y) == [2]


@pytest.mark.parametrize("f", EVERYWHERE)
def test_tangents_are_a_separate_group(f):
    assert traced(lambda x, y: jax.jvp(f, (x, y), (x, y)), X, Y) == [2, 2]


@pytest.mark.parametrize("f", [pair, scanned, jax.jit(pair), jax.checkpoint(pair)])
def test_cotangents_are_a_separate_group(f):
    found = traced(jax.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1)), X, Y)
    assert len(found) >= 2 and set(found) == {2}


def test_member_without_a_cotangent_is_left_out():
    assert traced(jax.grad(lambda x: pair(x, Y).sum()), X) == [2]
    found = traced(jax.grad(lambda x, y, z: sum(same(x, y, z)[:2]).sum(), argnums=(0, 1, 2)), X, Y, X)
    assert sorted(found) == [2, 3]


def test_linear_transpose_with_a_nonlinear_member():
    transposed = jax.linear_transpose(lambda x: same(x, Y)[0] * 2.0, X)
    np.testing.assert_array_equal(transposed(X)[0], 2 * X)


@pytest.mark.parametrize("axes", [(0, 0), (1, 2), (0, None), (None, 1)])
def test_members_have_one_shape_under_vmap(axes):
    many = np.stack([X, Y, X + Y])
    args = [x if axis is None else np.moveaxis(many, 0, axis) for x, axis in zip((X, Y), axes, strict=True)]
    f = jax.vmap(pair, in_axes=axes)
    jaxpr = jax.make_jaxpr(f)(*args)
    assert groups(jaxpr) == [2]
    a, b = ([many[i] for i in range(3)] if axis is not None else [x] * 3 for x, axis in zip((X, Y), axes, strict=True))
    np.testing.assert_allclose(
        f(*args), np.stack([np.sin(p) * np.cos(q) for p, q in zip(a, b, strict=True)]), rtol=1e-5
    )


def test_trees_are_grouped_leaf_by_leaf():
    def f(params, state):
        params = {"w": annotate(params["w"], P("data")), "b": params["b"]}
        params, state = same(params, state)
        return params, state

    c = sharding.jit(f).complete({"w": X, "b": X[0]}, {"w": Y, "b": Y[0]})
    assert (c.spec("state/w"), c.spec("state/b")) == (P("data"), P())


@pytest.mark.parametrize("f", EVERYWHERE)
def test_all_members_get_one_spec_and_results_are_unchanged(f):
    def both(x, y):
        return f(annotate(x, P("data", U)), annotate(y, P(U, "tensor")))

    step = sharding.jit(both)
    c = step.complete(X, Y)
    graph = c.assignment.graph
    for group in graph.groups:
        assert {c.assignment.specs[v].axes for v in group.members} == {(("data",), ("tensor",))}
    np.testing.assert_allclose(step(X, Y), f(X, Y), rtol=1e-5)


def test_gradients_are_those_of_one_device():
    def loss(x, y):
        return (pair(annotate(x, P("data", U)), annotate(y, P(U, "tensor"))) ** 2).sum()

    step = sharding.jit(jax.grad(loss, argnums=(0, 1)))
    expected = jax.grad(lambda x, y: ((jnp.sin(x) * jnp.cos(y)) ** 2).sum(), argnums=(0, 1))(X, Y)
    for a, b in zip(step(X, Y), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_groups_with_a_common_member_are_merged():
    def f(x, y, z):
        x, y = same(annotate(x, P("data")), y)
        return same(y, z)

    c = sharding.jit(f).complete(X, X, X)
    assert c.spec("z") == P("data")


def test_reasons_show_the_group():
    def f(x, w):
        a = annotate(jnp.sin(x), name="a")
        b = annotate(jnp.cos(w), name="b")
        a, b = same(a, b)
        return a, b @ w

    c = sharding.jit(f, in_shardings=(P("data", None), None)).complete(X, Y)
    steps = [line.split(" at ")[0].strip() for line in c.why("b", dim=0)]
    assert steps == [
        "b dim 0 is sharded over data:",
        "b dim 0 <- same group",
        "a dim 0 <- sin",
        "x dim 0 <- in_shardings",
    ]
    assert "test_same.py" in str(c.why("b", dim=0)).splitlines()[1]


def test_a_closed_dim_names_the_member_that_closes_it():
    def f(x, y):
        x, y = same(annotate(x, P(None, None)), y)
        return x, y + annotate(jnp.cos(x), P("data"))

    c = sharding.jit(f).complete(X, Y)
    assert c.spec("y") == P()
    reason = str(c.why("y", dim=0))
    assert ": closed by annotate at " in reason and reason.endswith(" on x, in the same sharding group")


def test_plain_jit_makes_one_shardy_group_of_each():
    def f(x, y, z, w):
        return *same(x, y), *same(z, w)

    text = jax.jit(f).lower(X, X, X, X).as_text()
    numbers = [line.split("group_id=")[1].split()[0] for line in text.splitlines() if "sdy.sharding_group" in line]
    assert len(numbers) == 4 and numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert jax.jit(f).lower(X, X, X, X).as_text() == text
    shardings = (P("data"), None, P(None, "tensor"), None)
    out = jax.jit(f, in_shardings=shardings)(X, X, X, X)
    assert [x.sharding.spec for x in out] == [P("data"), P("data"), P(None, "tensor"), P(None, "tensor")]


def test_engine_xla_leaves_the_group_to_xla():
    step = sharding.jit(lambda x, y: same(x * 2, y * 3), in_shardings=(P("data"), None), engine="xla")
    a, b = step(X, Y)
    assert a.sharding.is_equivalent_to(b.sharding, 2) and a.sharding.spec == P("data")


def test_group_in_a_program_inside_another_one():
    inner = sharding.jit(lambda x, y: same(x * 2, y * 3))

    def outer(x, y):
        a, b = inner(annotate(x, P("data")), y)
        return a, annotate(b, name="b")

    c = sharding.jit(outer).complete(X, Y)
    assert c.spec("b") == P("data") and c.spec("y") == P("data")
    np.testing.assert_allclose(sharding.jit(outer)(X, Y)[1], 3 * Y, rtol=1e-6)


def test_eager_members_get_the_sharding_of_the_first(mesh):
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    a, b = same(x, Y)
    assert a is x and b.sharding == x.sharding
    np.testing.assert_array_equal(b, Y)


# Errors


def test_conflicting_annotations_are_an_error_with_both_lines():
    def f(x, y):
        x = annotate(x, P("data"))
        y = annotate(y, P(None, "data"))
        return same(x, y)

    with pytest.raises(ShardingError, match=r"sharding.same at test_same.py:\d+ \(.*f\)") as caught:
        sharding.jit(f).complete(X, Y)
    found = caught.value.found
    assert [line.split(" from ")[0] for line in found] == ["x [data, -]", "y [-, data]"]
    lines = [int(line.split("test_same.py:")[1].split()[0]) for line in found]
    assert lines[1] == lines[0] + 1


def test_conflicting_committed_arguments_are_an_error(mesh):
    x, y = (jax.device_put(X, NamedSharding(mesh, P(axis))) for axis in ("data", "tensor"))
    with pytest.raises(
        ShardingError, match=r"(?s)x \[data, -\] from the argument's.*y \[tensor, -\] from the argument's"
    ):
        sharding.jit(lambda x, y: same(x, y)).complete(x, y)


@pytest.mark.parametrize(
    "first, second, found",
    [
        (P("data"), P("data"), P("data")),
        (P("data", U), P(U, "tensor"), P("data", "tensor")),
        (P(("data", ...)), P(("data", "tensor")), P(("data", "tensor"))),
        (P(("data", ...), None), P("data", U), P("data")),
        (P("data"), P("tensor"), None),
        (P("data"), P(("data", "tensor")), None),
        (P("data", U), P(U, "data"), None),
        (P(), P("data"), None),
    ],
)
def test_compatible_annotations_are_merged(first, second, found):
    def f(x, y):
        return same(annotate(x, first), annotate(y, second))

    step = sharding.jit(f)
    if found is None:
        with pytest.raises(ShardingError, match="one spec for all members of a group"):
            step.complete(X, Y)
    else:
        c = step.complete(X, Y)
        assert c.spec("x") == c.spec("y") == found


def test_priorities_of_members_are_combined():
    def f(x, y, z):
        x, y = same(annotate(x, P("data", U), priority=2), annotate(y, P("data", U), priority=1))
        return x + z, y

    c = sharding.jit(f, in_shardings=(None, None, P(U, "data"))).complete(X, Y, X)
    assert c.spec("x") == P("data") and c.spec("y") == P("data")


@pytest.mark.parametrize(
    "args, message",
    [
        ((X,), "of 1 arrays"),
        ((), "of 0 arrays"),
        ((X, X[0]), r"(?s)member 0 has the shape \(8, 8\).*member 1 has the shape \(8,\)"),
        (({"a": X, "b": X}, {"a": X, "b": X[:4]}), r"sharding.same\(...\): b"),
        (({"a": X, "b": X}, {"a": X[0], "b": X[:4]}), r"2 failures"),
        (({"a": X}, [X]), r"(?s)member 1 is .*the same pytree structure"),
    ],
)
def test_bad_group_is_an_error(args, message):
    with pytest.raises(ShardingError, match=message):
        same(*args)
