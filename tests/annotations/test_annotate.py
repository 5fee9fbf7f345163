"""Annotations survive every JAX transformation; outside `sharding.jit` they are plain sharding constraints."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate, compat
from sharding.annotations.padding import padding_bytes
from sharding.spec import Dim, Spec

U = P.UNCONSTRAINED
X = np.arange(64, dtype=np.float32).reshape(8, 8) / 64


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def annotations(jaxpr):
    """(spec as text, name) of every annotation in a jaxpr and its sub-jaxprs."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "annotate":
            found.append((str(eqn.params["asked"]), eqn.params["name"]))
        for _, _, inner in compat.sub_jaxprs(eqn.params):
            found += annotations(inner)
    return found


def traced(f, *args):
    return annotations(jax.make_jaxpr(f)(*args))


def hidden(x):
    return annotate(jnp.sin(x), P("data"), name="hidden")


HIDDEN = ("[data, -]", "hidden")


def scanned(x):
    return jax.lax.scan(lambda c, _: (hidden(c), None), x, None, length=3)[0]


def looped(x):
    return jax.lax.while_loop(lambda c: c[0, 0] < 0, hidden, x)


def branched(x):
    return jax.lax.cond(x[0, 0] > 0, hidden, jnp.cos, x)


@jax.custom_vjp
def custom(x):
    return hidden(x)


custom.defvjp(lambda x: (hidden(x), x), lambda x, g: (2 * g * jnp.cos(x),))


@pytest.mark.parametrize("f", [hidden, scanned, looped, branched, jax.jit(hidden), jax.checkpoint(hidden), custom])
def test_annotation_survives_tracing(f):
    assert traced(f, X) == [HIDDEN]


@pytest.mark.parametrize("f", [hidden, scanned, branched, jax.jit(hidden), jax.checkpoint(hidden)])
def test_tangent_gets_the_spec_but_not_the_name(f):
    found = traced(lambda x, t: jax.jvp(f, (x,), (t,)), X, X)
    assert sorted(found, key=str) == sorted([HIDDEN, ("[data, -]", None)], key=str)


@pytest.mark.parametrize("f", [hidden, scanned, branched, jax.jit(hidden), jax.checkpoint(hidden)])
def test_cotangent_gets_the_spec(f):
    found = traced(jax.grad(lambda x: f(x).sum()), X)
    assert HIDDEN in found
    assert ("[data, -]", None) in found


def test_custom_derivative_rule_keeps_its_annotations():
    grad = jax.grad(lambda x: custom(x).sum())
    assert traced(grad, X) == [HIDDEN]
    np.testing.assert_allclose(grad(X), 2 * np.cos(X), rtol=1e-6)


@pytest.mark.parametrize("axis, spec", [(0, "[?, data, -]"), (1, "[data, ?, -]"), (-1, "[data, -, ?]")])
def test_batch_dim_is_open(axis, spec):
    batch = np.zeros((3, 8, 8), np.float32).swapaxes(0, axis)
    f = jax.vmap(lambda x: annotate(x, P("data"), name="h"), in_axes=axis, out_axes=axis)
    assert traced(f, batch) == [(spec, "h")]


def test_two_vmaps_open_two_dims():
    f = jax.vmap(jax.vmap(lambda x: annotate(x, P("data"))))
    assert traced(f, np.zeros((2, 3, 8), np.float32)) == [("[?, ?, data]", None)]


def test_vmap_of_grad_keeps_the_spec_of_the_cotangent():
    f = jax.vmap(jax.grad(lambda x: (hidden(x) ** 2).sum()))
    assert ("[?, data, -]", None) in traced(f, np.zeros((3, 8, 8), np.float32))


def test_pytree_is_annotated_leaf_by_leaf():
    f = lambda x: annotate({"a": x, "b": [x * 2]}, P("data"), name="h")  # noqa: E731 one expression
    assert traced(f, X) == [("[data, -]", "h")] * 2


def test_name_without_a_spec_constrains_nothing():
    assert traced(lambda x: annotate(x, name="h"), X) == [("None", "h")]
    eager = annotate(X, name="h")
    assert isinstance(eager, jax.Array)
    np.testing.assert_array_equal(eager, X)


def test_priority_applies_to_every_dim():
    jaxpr = jax.make_jaxpr(lambda x: annotate(x, P("data", U), priority=2))(X)
    spec = jaxpr.eqns[0].params["asked"]
    assert spec == Spec(dims=(Dim(axes=("data",), priority=2), Dim(open=True, priority=2)))


@pytest.mark.parametrize("first, second, kept", [(0, 1, "data"), (1, 0, "tensor"), (2, 1, "tensor")])
def test_lower_priority_number_takes_precedence(first, second, kept):
    def f(a, b):
        return annotate(a, P("data", U), priority=first) + annotate(b, P("tensor", U), priority=second)

    assert sharding.jit(f).complete(X, X).spec("out") == P(kept)


def test_plain_constraint_under_jax_jit():
    out = jax.jit(lambda x: annotate(x * 2, P("data", "tensor")))(X)
    assert out.sharding.spec == P("data", "tensor")
    np.testing.assert_array_equal(out, 2 * X)


def test_plain_constraint_eagerly(mesh):
    out = annotate(X, P("data", U))
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    np.testing.assert_array_equal(out, X)


def test_random_keys_are_annotated():
    keys = jax.random.split(jax.random.key(0), 8)
    out = jax.jit(lambda k: annotate(k, P("data")))(keys)
    assert out.sharding.spec == P("data")
    np.testing.assert_array_equal(jax.random.key_data(out), jax.random.key_data(keys))


def test_auto_axes_can_be_used_inside_shard_map(mesh):
    def body(x):
        return annotate(x * 2, P(None, "tensor"), name="h") + 1

    f = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X + 1)


def test_manual_axes_cannot_be_used_inside_shard_map(mesh):
    f = jax.shard_map(
        lambda x: annotate(x, P("data")), mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(ShardingError, match="mesh axes tensor=4"):
        jax.jit(f)(X)


ODD = np.ones((3, 6), np.float32)


@pytest.mark.parametrize("where", ["eager", "jax.jit", "sharding.jit"])
def test_indivisible_dim_warns_with_its_cost(where):
    def f(x):
        return annotate(x, P("data", "tensor"), name="odd") * 2

    # 3 x 6 as 2 x 4 shards of 2 x 2: 32 elements instead of 18
    run = {"eager": f, "jax.jit": jax.jit(f), "sharding.jit": sharding.jit(f)}[where]
    with pytest.warns(UserWarning, match=r"'odd'.*3 = 1 x 2 \+ 1; dim 1 .* 6 = 1 x 4 \+ 2.* 56 bytes") as caught:
        out = run(ODD)
    np.testing.assert_array_equal(out, 2 * ODD)
    assert caught[0].filename == __file__


def test_padding_bytes_counts_all_shards():
    sizes = {"data": 2, "tensor": 4}
    spec = Spec(dims=(Dim(axes=("data", "tensor")), Dim()))
    assert padding_bytes(spec, np.ones((9, 5), np.float16), sizes) == (16 - 9) * 5 * 2
    assert padding_bytes(spec, np.ones((8, 5), np.float16), sizes) == 0


def test_strict_makes_padding_an_error():
    step = sharding.jit(lambda x: annotate(x, P("data")) * 2, strict=True)
    with pytest.warns(UserWarning, match="pads"), pytest.raises(ShardingError, match=r"(?s)annotate at .*3 = 1 x 2"):
        step(ODD)


def test_error_has_the_request_found_required_and_fix():
    with pytest.raises(ShardingError, match="'data' instead of 'dat'") as caught:
        annotate(X, P("dat"), name="h")
    asked, *rest = str(caught.value).splitlines()
    assert asked == f"sharding.annotate('h', {P('dat')})"
    assert [line[:11].strip() for line in rest] == ["found:", "", "required:", "fix:"]
    assert "(8, 8), mesh axes data=2, tensor=4" in rest[0]


@pytest.mark.parametrize(
    "spec, message",
    [
        (P("model"), r"entry 0 names 'model'"),
        (P("data", "data"), r"(?s)axis 'data' is used twice: in entries 0 and 1.*fix: +P\('data', None\)"),
        (P(("data", "tensor", "data")), r"(?s)twice: in entry 0.*fix: +P\(\('data', 'tensor'\)"),
        (P("data", None, None), r"(?s)3 entries for 2 dims.*fix: +P\('data', None\)"),
        (P("dat", None, "tensr"), r"(?s)3 entries for 2 dims.*names 'dat'.*names 'tensr'"),
        ("data", r"(?s)'data', of type str.*fix: +P\('data'\)"),
        (("data", None), r"(?s)of type tuple.*fix: +P\('data', None\)"),
    ],
)
def test_bad_spec_is_an_error_that_names_the_fault(spec, message):
    with pytest.raises(ShardingError, match=message):
        annotate(X, spec)


def test_spec_for_a_scalar_is_too_long():
    with pytest.raises(ShardingError, match="1 entries for 0 dims"):
        annotate(1.0, P("data"))


def test_spec_without_a_mesh_is_an_error():
    with ThreadPoolExecutor(1) as thread:  # a mesh is current in the thread that entered it
        assert thread.submit(annotate, X, name="h").result().shape == X.shape
        with pytest.raises(ShardingError, match=r"(?s)found: +no mesh.*fix: .*with sharding.mesh"):
            thread.submit(annotate, X, P("data")).result()
