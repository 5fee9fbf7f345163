"""What a program must name to run with Explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

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
        return jax.lax.with_sharding_constraint(x * 2, P(None, "data")).sum()

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
        return jax.lax.scan(lambda h, _: (annotate(jnp.tanh(h @ w) @ v, P("data")), None), x, None, length=3)[0]

    (one,) = completed(f).explicit()
    assert (one.op, one.spec) == ("dot_general", P("data"))
