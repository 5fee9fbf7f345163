"""`constrain`: adds constraints and changes nothing else in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import sharding
from sharding import P, annotate, compat, cost

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
W = np.cos(np.arange(64, dtype=np.float32)).reshape(8, 8)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def before_and_after(f, *args):
    """Returns the jaxpr as traced by JAX, and as run by `sharding.jit`."""
    return jax.jit(f).trace(*args).jaxpr, sharding.jit(f).trace(*args).jaxpr


def equations(jaxpr, name=None):
    """Returns the equations of a jaxpr and of nested ones, in order; only those of one primitive if a name is given."""
    found = []
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        found += [eqn] if name in (None, eqn.primitive.name) else []
        for _, _, inner in compat.sub_jaxprs(eqn.params):
            found += equations(inner, name)
    return found


def skeleton(jaxpr):
    """Returns the primitives in order, without annotations."""
    return [name for eqn in equations(jaxpr) if (name := eqn.primitive.name) != "annotate"]


def params(eqn):
    """Returns an equation's parameters without its jaxprs."""
    jaxprs = {key for key, _, _ in compat.sub_jaxprs(eqn.params)}
    return {k: v for k, v in eqn.params.items() if k not in jaxprs}


def blocks(jaxpr):
    """Returns the jaxprs of the calls of a nested jit named `block`."""
    return [eqn.params["jaxpr"] for eqn in equations(jaxpr, "jit") if eqn.params["name"] == "block"]


def same(f, *args, rtol=1e-6):
    """Asserts that `sharding.jit(f)` gives the values of `f` on one device, and returns them."""
    expected = jax.device_get(jax.jit(f)(*args))
    out = sharding.jit(f)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), jax.device_get(out), expected)
    return out


def layer(x, w):
    return jnp.tanh(annotate(x @ w, P("data", "tensor")))


def scanned(x, w):
    return jax.lax.scan(lambda c, i: (layer(c, w) + i, c.sum()), x, jnp.arange(3.0), reverse=True, unroll=1)


def looped(x, w):
    """Ends by a value: a loop of known length becomes a scan."""
    return jax.lax.while_loop(lambda s: (s[0] < 3) & (s[1] < 2).all(), lambda s: (s[0] + 1, layer(s[1], w)), (0, x))


def branched(x, w):
    return jax.lax.switch(jnp.int32(x[0, 0] > 0), [lambda x: layer(x, w), lambda x: x * 2, jnp.sin], x)


saved = jax.checkpoint_policies.dots_saveable


def remat(x, w):
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)(x, w)


@pytest.mark.parametrize("f", [layer, scanned, looped, branched, remat, jax.jit(layer)])
def test_only_annotations_are_added(f):
    before, after = before_and_after(f, X, W)
    assert skeleton(after)[-len(skeleton(before)) :] == skeleton(before)
    assert len(equations(after, "annotate")) > len(equations(before, "annotate"))
    same(f, X, W)


@pytest.mark.parametrize("f, name", [(scanned, "scan"), (looped, "while"), (branched, "cond"), (remat, "remat2")])
def test_parameters_of_control_flow_and_remat_stay(f, name):
    before, after = before_and_after(f, X, W)
    (old,), (new,) = equations(before, name), equations(after, name)
    assert new.params.keys() == old.params.keys()
    assert params(new) == params(old)
    assert len(list(compat.sub_jaxprs(new.params))) == len(list(compat.sub_jaxprs(old.params)))


def test_remat_in_a_gradient_keeps_its_policy_and_number():
    def loss(x, w):
        for _ in range(2):
            x = remat(x, w)
        return (x**2).sum()

    before, after = before_and_after(jax.grad(loss, argnums=(0, 1)), X, W)
    old, new = equations(before, "remat2"), equations(after, "remat2")
    assert len(new) == len(old) == 2
    for a, b in zip(old, new, strict=True):
        assert a.params["policy"] is b.params["policy"] is saved
        assert a.params["prevent_cse"] is b.params["prevent_cse"] is False
    same(jax.grad(loss, argnums=(0, 1)), X, W, rtol=1e-4)


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g, -1, 1) + x * 0,))


@jax.custom_jvp
def odd(x):
    return jnp.sin(x)


odd.defjvp(lambda p, t: (jnp.sin(p[0]), 100.0 * t[0]))


@pytest.mark.parametrize("f, grad", [(clipped, 1.0), (odd, 100.0)])
def test_custom_derivative_rules_stay(f, grad):
    step = sharding.jit(lambda x: f(annotate(x * 5, P("data"))).sum())
    np.testing.assert_allclose(jax.grad(step)(X), 5 * grad * np.ones((8, 8)), rtol=1e-6)


def test_custom_jvp_of_a_custom_rule_under_jit_inside_scan():
    def f(x):
        return jax.lax.scan(lambda c, _: (odd(c), None), annotate(x, P("data")), None, length=2)[0].sum()

    np.testing.assert_allclose(jax.grad(sharding.jit(f))(X), 1e4 * np.ones((8, 8)), rtol=1e-6)


def test_name_stack_and_source_line_of_a_constraint_are_those_of_its_equation():
    def f(x):
        with jax.named_scope("block"):
            return jax.lax.cumsum(annotate(x, P("data", None)))

    _, after = before_and_after(f, X)
    total = equations(after, "cumsum")[0]
    behind = equations(after)[equations(after).index(total) + 1]
    assert behind.primitive.name == "annotate"
    assert "block" in str(behind.source_info.name_stack)
    assert compat.source_line(behind) == compat.source_line(total)
    assert compat.source_line(total).startswith("test_constrain.py:")


def test_calls_sharded_identically_share_one_jaxpr():
    @jax.jit
    def block(x):
        return jnp.tanh(x @ x)

    def f(x):
        x = annotate(x, P("data", None)) * 1
        return block(block(block(x)))

    _, after = before_and_after(f, X)
    bodies = blocks(after)
    assert len(bodies) == 3
    assert len({id(body) for body in bodies}) == 1
    same(f, X, rtol=1e-4)


def test_calls_sharded_differently_get_two_jaxprs():
    @jax.jit
    def block(x):
        return x * 2

    def f(x, y):
        return block(annotate(x, P("data", None))), block(annotate(y, P("tensor", None)))

    _, after = before_and_after(f, X, W)
    first, second = [equations(body, "annotate") for body in blocks(after)]
    assert str(first[0].params["spec"]) == "[data, -]"
    assert str(second[0].params["spec"]) == "[tensor, -]"


def test_effects_stay_in_order(capfd):
    seen = []

    def note(i):
        io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)

    def f(x):
        note(1)
        x = annotate(x, P("data")) * 2
        jax.debug.print("here {}", x[0, 0])
        note(2)
        x, _ = jax.lax.scan(lambda c, i: (note(i) or c + 1, None), x, jnp.arange(3, 6))
        note(6)
        return x

    before, after = before_and_after(f, X)
    assert after.effects == before.effects
    np.testing.assert_allclose(sharding.jit(f)(X), 2 * X + 3, rtol=1e-6)
    jax.effects_barrier()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert capfd.readouterr().out == "here 0.0\n"


def test_constants_of_the_program_stay():
    table = np.arange(8, dtype=np.float32)
    same(lambda x: annotate(x, P("data")) + table[None, :] + jnp.asarray(W), X)


def test_constants_of_loops_stay():
    same(lambda x: jax.lax.scan(lambda c, _: (annotate(c @ W, P("data")), c.sum()), x, None, length=2), X, rtol=1e-4)


def test_literals_arguments_and_repeated_values_as_results():
    def f(x):
        y = annotate(x * 2, P("data"))
        return x, y, y, 1.5, 3, True, np.float32(2), None, x

    out = same(f, X)
    assert out[7] is None
    assert out[1].sharding.spec == out[2].sharding.spec == P("data")


@pytest.mark.parametrize("f", [lambda: None, lambda: (), lambda: {}, lambda: 3, lambda: np.ones(3), lambda: {"a": ()}])
def test_program_without_arguments(f):
    out = sharding.jit(f)()
    assert jax.tree.structure(out) == jax.tree.structure(f())
    jax.tree.map(np.testing.assert_array_equal, out, f())


@pytest.mark.parametrize("f", [lambda x: x, lambda x: {"a": x, "b": [x]}, lambda x: None, lambda x: (x, 1)])
def test_program_without_equations(f):
    same(f, X)


def test_scalars_only():
    assert same(lambda a, b: (a + b, a > b, a), 1.0, 2) == (3.0, False, 1.0)


def test_arrays_of_no_elements():
    assert same(lambda x: annotate(x, P("data")) * 2, np.ones((0, 4), np.float32)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint32, bool, jnp.complex64])
def test_every_dtype(dtype):
    same(lambda x: annotate(x, P("data")).T, X.astype(dtype))


def key_data(tree):
    return jax.tree.map(lambda k: np.asarray(jax.random.key_data(k)), tree)


def test_random_keys_as_arguments_and_results():
    keys = jax.random.split(jax.random.key(3), 8)

    def f(keys):
        keys = annotate(keys, P("data"))
        split = jax.vmap(jax.random.split)(keys)
        return keys, split[:, 0], keys[0], jax.vmap(lambda k: jax.random.normal(k, (4,)))(split[:, 1])

    *ours, normal = sharding.jit(f)(keys)
    *theirs, expected = jax.jit(f)(keys)
    jax.tree.map(np.testing.assert_array_equal, key_data(ours), key_data(theirs))
    np.testing.assert_allclose(normal, expected, rtol=1e-6)


def test_random_keys_are_carried_by_loops_and_branches():
    def f(key, x):
        def body(carry, _):
            key, x = carry
            key, use = jax.random.split(key)
            return (key, annotate(x, P("data")) + jax.random.uniform(use, x.shape)), use

        (key, x), uses = jax.lax.scan(body, (key, x), None, length=2)
        key = jax.lax.cond(x[0, 0] > 0, lambda k: k, lambda k: jax.random.fold_in(k, 1), key)
        return jax.random.key_data(key), x, jax.random.key_data(uses)

    same(f, jax.random.key(0), X)


def test_carried_batches_of_keys_are_sharded():
    keys = jax.random.split(jax.random.key(3), 8)

    def f(keys):
        fold = jax.vmap(lambda k: jax.random.fold_in(k, 1))
        return jax.lax.scan(lambda c, _: (fold(annotate(c, P("data"))), None), keys, None, length=2)[0]

    out = sharding.jit(f)(keys)
    assert out.sharding.spec == P("data")
    np.testing.assert_array_equal(key_data(out), key_data(jax.jit(f)(keys)))


def test_donation_frees_the_argument():
    x = jax.device_put(X, jax.NamedSharding(sharding.mesh(data=2, tensor=4).mesh, P("data")))
    out = sharding.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_allclose(out, 2 * X, rtol=1e-6)


def test_lowered_program_is_the_same_every_time():
    def text():
        return sharding.jit(lambda x, w: scanned(x, w)[0] @ w).lower(X, W).as_text()

    assert text() == text()


@pytest.mark.parametrize("constraint", [annotate, jax.lax.with_sharding_constraint])
def test_a_constraint_is_one_reshard(constraint):
    def f(x, w):
        return jnp.sin(constraint(constraint(x @ w, P("data", "tensor")), P("data")))

    compiled = sharding.jit(f, in_shardings=(P("data"), P(None, "tensor")), out_shardings=P("data")).lower(X, W)
    assert cost.read_compiled(compiled.compile()).by_kind() == {"all-gather": (1, 128)}
