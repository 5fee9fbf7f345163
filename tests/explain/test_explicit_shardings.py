"""What a program must name to run with Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from support.explicit_program import ExplicitProgram

import sharding
from sharding import P, annotate

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)


def program(w, v, x):
    hidden = jax.nn.relu(x @ w)
    out = hidden @ v
    return out.reshape(4, 2, 8).sum(axis=1)


SPECS = (P(None, "tensor"), P("tensor"), P("data"))


def completed(f=program, specs=SPECS):
    with sharding.mesh(data=2, tensor=4):
        return sharding.jit(f, in_shardings=specs).complete(X, X, X)


def explicit_program(out):
    """The program with the one spec that is missing."""

    def f(w, v, x):
        hidden = jax.nn.relu(x @ w)
        return jnp.dot(hidden, v, out_sharding=out).reshape(4, 2, 8).sum(axis=1)

    return f


def test_the_ambiguous_product_is_named_and_suffices():
    completion = completed()
    (one,) = completion.explicit()
    assert (one.op, one.spec) == ("dot_general", P("data")) and "out_sharding=" in one.write
    assert one.source.endswith("(program)") and "out_sharding" in str(completion.explicit())
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)):
        w, v, x = (jax.device_put(X, spec) for spec in SPECS)
        y = jax.jit(explicit_program(one.spec))(w, v, x)
        assert y.sharding.is_equivalent_to(jax.sharding.NamedSharding(y.sharding.mesh, completion.out_shardings), 2)
        with pytest.raises(Exception, match="ambiguous|out_sharding"):
            jax.jit(program)(w, v, x)


def test_a_program_whose_shardings_follow_needs_nothing():
    completion = completed(lambda w, v, x: jnp.tanh(x) * 2 + x, (P(), P(), P("data", "tensor")))
    assert completion.explicit() == ()
    assert "derives every sharding" in str(completion.explicit())


def test_a_constraint_is_a_reshard_and_the_backward_pass_needs_nothing():
    def f(w, v, x):
        return lax.with_sharding_constraint(x * 2, P(None, "data")).sum()

    (one,) = completed(f, (P(), P(), P("data"))).explicit()
    assert (one.spec, one.write) == (P(None, "data"), "jax.sharding.reshard(x, ...)")
    forward = completed(lambda w, v, x: program(w, v, x).sum()).explicit()
    assert completed(jax.grad(lambda w, v, x: program(w, v, x).sum())).explicit() == forward


def test_the_result_of_a_callback_is_named():
    def f(w, v, x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(X.shape, X.dtype), annotate(x @ w, P("data")))

    found = completed(f, (P(), P(), P("data"))).explicit()
    assert [(one.op, one.spec) for one in found] == [("pure_callback", P())]


def test_inside_a_scan():
    def f(w, v, x):
        return lax.scan(lambda h, _: (annotate(jnp.tanh(h @ w) @ v, P("data")), None), x, None, length=3)[0]

    (one,) = completed(f).explicit()
    assert (one.op, one.spec) == ("dot_general", P("data"))


def until(limit, w, x):
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + 1, annotate(s[1] @ w, P(None, "tensor"))), (0, x))


def normalized(x, w):
    mean, deviation = x.mean(-1, keepdims=True), jnp.sqrt(x.var(-1, keepdims=True) + 1)
    return (x - mean) / deviation @ w


PROGRAMS = {
    "carry": lambda w, v, x: lax.scan(lambda h, _: (jnp.tanh(h @ w) @ v, None), x, None, length=3)[0],
    "carry from zeros": lambda w, v, x: lax.scan(lambda h, y: (h + y @ w, h), jnp.zeros(8), x),
    "stacked arguments": lambda w, v, x: lax.scan(lambda h, y: (h @ y, None), x, jnp.stack([w, v @ w]))[0],
    "stacked results": lambda w, v, x: lax.scan(
        lambda h, _: (jnp.tanh(h @ w), annotate(h * 2, P("data"))), x @ w @ v, None, length=3
    ),
    "while": lambda w, v, x: until(3, w, x),
    "while of a sum": lambda w, v, x: until(x.sum().astype(int), w, x),
    "cond": lambda w, v, x: lax.cond(x[0, 0] > 0, lambda a: a @ w @ v, jnp.zeros_like, x),
    "cond of two specs": lambda w, v, x: lax.cond(
        x.sum() > 0, lambda a: annotate(a @ w, P(None, "tensor")), lambda a: annotate(a * 2, P("data")), x
    ),
    "top_k": lambda w, v, x: lax.top_k(x @ w, 2),
    "argsort": lambda w, v, x: jnp.argsort(x @ w),
    "svd": lambda w, v, x: jnp.linalg.svd(x @ w + jnp.eye(8))[1],
    "cumsum": lambda w, v, x: jnp.cumsum(x @ w, 1),
    "rows": lambda w, v, x: jnp.take(w, jnp.argmax(x, axis=1), axis=0),
    "scatter": lambda w, v, x: x.at[jnp.argmax(x, axis=1)[:2]].set(0.0),
    "uneven slice": lambda w, v, x: (x @ w)[:3, 1:3],
    "uneven pad": lambda w, v, x: jnp.pad(x @ w, 1),
    "concatenate": lambda w, v, x: jnp.concatenate([x @ w, x], axis=1),
    "roll": lambda w, v, x: jnp.roll(x, 1, 0),
    "remat": lambda w, v, x: jax.checkpoint(lambda x: jax.nn.relu(x @ w) @ v)(x),
    "softmax": lambda w, v, x: jax.nn.softmax(x @ w) @ v,
    "one-hot": lambda w, v, x: jax.nn.one_hot(jnp.argmax(x, 1), 8) @ w,
    "transpose and reshape": lambda w, v, x: (x @ w).T.reshape(16, 4),
    "dropout": lambda w, v, x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
    "norm": lambda w, v, x: normalized(x, w),
    "constraint": lambda w, v, x: lax.with_sharding_constraint(x * 2, P(None, "data")) @ w,
    "annotated twice": lambda w, v, x: annotate(annotate(x * 2, P("data")), P("tensor")),
}
NO_GRADIENT = {"while", "while of a sum", "top_k", "argsort", "rows", "one-hot", "svd"}
LAYOUTS = {
    "megatron": SPECS,
    "fsdp": (P("data", "tensor"), P("tensor", "data"), P(("data", "tensor"))),
    "inputs": (P("tensor"), P(), P("data", "tensor")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_named_suffices(name, layout):
    """With Explicit axes and what is named the program has its numbers and shardings; so does its gradient."""
    f, specs = PROGRAMS[name], LAYOUTS[layout]
    with sharding.mesh({"data": 1, "tensor": 1}, devices=jax.devices()[:1]), jax.numpy_rank_promotion("allow"):
        expected = jax.tree.leaves(jax.jit(f)(X, X, X))
        gradients = None if name in NO_GRADIENT else jax.jit(jax.grad(summed(f), (0, 1, 2)))(X, X, X)
    with jax.numpy_rank_promotion("allow"):
        completion = completed(f, specs)
    explicit = ExplicitProgram(completion)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)):
        args = [jax.device_put(X, spec) for spec in specs]
        found = jax.jit(explicit)(*args)
        for y, other, spec in zip(found, expected, jax.tree.leaves(completion.out_shardings), strict=True):
            np.testing.assert_allclose(y, other, rtol=1e-4, atol=1e-4)
            assert y.sharding.is_equivalent_to(jax.NamedSharding(jax.sharding.get_mesh(), spec), y.ndim)
        if gradients is not None:
            for g, other in zip(jax.jit(jax.grad(summed(explicit), (0, 1, 2)))(*args), gradients, strict=True):
                np.testing.assert_allclose(g, other, rtol=1e-3, atol=1e-3)


def summed(f):
    return lambda *args: sum((y**2).sum() for y in jax.tree.leaves(f(*args)))
