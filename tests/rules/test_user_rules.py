"""User rules: for custom primitives and Pallas kernels, and in place of the library's own."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import mlir

import sharding
from sharding import P, ShardingError, rules

matmul_p = jex.Primitive("mine.matmul")
matmul_p.def_abstract_eval(lambda x, w: jax.core.ShapedArray((*x.shape[:-1], w.shape[1]), x.dtype))
matmul_p.def_impl(jnp.matmul)
mlir.register_lowering(matmul_p, mlir.lower_fun(jnp.matmul, multiple_results=False))

SIZES = {"data": 2, "tensor": 4}
X, W = np.arange(64.0, dtype=np.float32).reshape(8, 8), np.ones((8, 16), np.float32)


@pytest.fixture
def register():
    """Registers rules for one test."""
    done = []

    def register(primitive, rule, *, kernel=None, **options):
        rules.register(primitive, rule, kernel=kernel, **options)
        done.append((primitive, kernel))

    yield register
    for primitive, kernel in done:
        rules.unregister(primitive, kernel=kernel)


def completed(f, *args, in_shardings):
    with sharding.mesh(SIZES):
        return sharding.jit(f, in_shardings=in_shardings).complete(*args)


@pytest.mark.parametrize(
    "rule", ["... k, k j -> ... j", lambda ins, outs, params: "i k, k j -> i j"], ids=["text", "function"]
)
def test_a_primitive_of_the_user(register, rule):
    f = sharding.jit(lambda x, w: jnp.sin(matmul_p.bind(x, w)), in_shardings=(P("data"), P(None, "tensor")))
    with sharding.mesh(SIZES):
        before = f.complete(X, W)
        assert [one.op for one in before.unknown] == ["mine.matmul"] and before.spec("out") == P()
        register(matmul_p, rule)
        after = f.complete(X, W)  # a new rule is another program
        assert not after.unknown and after.spec("out") == P("data", "tensor")
        assert "mine.matmul" in str(after.why("out", 1))
        np.testing.assert_allclose(f(X, W), np.sin(X @ W), rtol=1e-4, atol=1e-4)


def test_the_next_call_uses_newly_registered_rules(register):
    f = sharding.jit(lambda x: matmul_p.bind(x, jnp.ones((8, 16))), in_shardings=P("data"))
    with sharding.mesh(SIZES):
        assert f(f(X)[:, :8]).sharding.spec == P()
        register("mine.matmul", "i k, k j -> i j")
        assert f(X).sharding.spec == P("data")


def test_a_rule_of_none_stops_propagation(register):
    register("sin", lambda ins, outs, params: None)
    c = completed(lambda x: jnp.sin(x), X, in_shardings=(P("data"),))
    assert [one.op for one in c.unknown] == ["sin"] and c.spec("out") == P()


def kernel(name):
    def copy(source, target):
        target[...] = source[...]

    def call(x):
        block = pl.BlockSpec((1, 1), lambda i, j: (i, j))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        options = {"grid": x.shape, "in_specs": [block], "out_specs": block, "name": name, "interpret": True}
        return pl.pallas_call(copy, out_shape=shape, **options)(x)

    return call


def test_kernels_have_rules_of_their_own(register):
    register("pallas_call", "i j -> i j", kernel="copied")
    register("pallas_call", "i j -> i j", kernel="moved", need_replication=["i"])
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    specs = (P("data", "tensor"),)
    assert completed(kernel("copied"), shape, in_shardings=specs).spec("out") == P("data", "tensor")
    assert completed(kernel("moved"), shape, in_shardings=specs).spec("out") == P(None, "tensor")
    (unknown,) = completed(kernel("other"), shape, in_shardings=specs).unknown
    assert unknown.op == "pallas_call"


def test_a_kernel_gives_the_numbers_of_one_device(register):
    register("pallas_call", "i j -> i j", kernel="copied")
    with sharding.mesh(SIZES):
        found = sharding.jit(lambda x: kernel("copied")(x) + 1, in_shardings=P("data"))(X)
    np.testing.assert_array_equal(found, X + 1)


@pytest.mark.parametrize(
    "args, options, complaint",
    [
        ((7, "i -> i"), {}, "a primitive or its name"),
        (("p", 7), {}, "a rule as text or a function"),
        (("p", "i -> "), {"kernel": "k"}, "pallas_call and ffi_call"),
        (("p", "i i -> i"), {}, "'i' twice"),
    ],
)
def test_bad_registrations(args, options, complaint):
    with pytest.raises(ShardingError, match=complaint):
        rules.register(*args, **options)


def test_shapes_that_do_not_fit_name_the_rule(register):
    register(matmul_p, "i k, k j -> i j")
    with pytest.raises(ShardingError, match="operand 0 has 3 dims"):
        completed(lambda x, w: matmul_p.bind(x, w), X[None], W, in_shardings=(None, None))


@pytest.mark.parametrize("rule", ["i 1 -> i 1", lambda *_: "i 1 -> i 1"], ids=["text", "function"])
def test_a_dim_of_a_kernel_of_which_nothing_is_said_is_whole(register, rule):
    register("pallas_call", rule, kernel="copied")
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert completed(kernel("copied"), shape, in_shardings=(P("data", "tensor"),)).spec("out") == P("data")
