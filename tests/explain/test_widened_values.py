"""GPUs move what is widened, or only used narrow, in its narrow dtype; other platforms move the wide value."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support import compilers, quick_compile

import sharding
from sharding import P, cost

HAS_GPU_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None


def sorted_along_the_batch(widen):
    def program(x):
        wide = widen(x)
        return jnp.sort(wide, 0), wide  # used twice, so not resharded before it is widened

    return program


def upcast(x):
    return x.astype(jnp.float32)


PROGRAMS = {
    "converted": (upcast, "bfloat16"),
    "scaled": (lambda x: upcast(x) * 0.125, "bfloat16"),
    "reshaped": (lambda x: upcast(x).reshape(32, 8, 8), "bfloat16"),
    "transposed": (lambda x: upcast(x.reshape(32, 8, 8)).transpose(0, 2, 1), "bfloat16"),
    "a mask": (lambda x: (x > 0).astype(jnp.int32), "bool"),
    "added to": (lambda x: upcast(x) + 1, "float32"),
    "negated": (lambda x: -upcast(x), "float32"),
}
X = jax.ShapeDtypeStruct((32, 64), "bfloat16")


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_dtype_that_is_moved(name):
    widen, dtype = PROGRAMS[name]
    with sharding.mesh(a=8):
        ledger = sharding.jit(sorted_along_the_batch(widen), in_shardings=P("a")).complete(X).communication()
    wide = jax.eval_shape(widen, X).dtype
    for platform, expected in (("cpu", wide), ("tpu", wide), ("gpu", jnp.dtype(dtype))):
        found = next(iter(ledger.lowered(platform)))
        assert (found.dtype, found.result_bytes) == (str(expected), 32 * 64 // 8 * expected.itemsize)


@pytest.mark.skipif(not HAS_GPU_COMPILER, reason="no cuda13")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_compiled(name):
    with sharding.mesh(a=8, devices=cost.compile_only("h100:1x8")):
        step = sharding.jit(sorted_along_the_batch(PROGRAMS[name][0]), in_shardings=P("a"))
        predicted = step.complete(X).communication().lowered("gpu").by_kind()
        compiled = cost.read_compiled(step.lower(X).compile(quick_compile.OPTIONS))
    assert predicted == compiled.by_kind()


@pytest.mark.parametrize(("times", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_what_is_only_read_narrow(times, dtype):
    def program(x):
        kept = sharding.annotate(jnp.sin(x), P("a")).reshape(32, 8, 8)
        moved = sharding.annotate(kept, P(None, "a"))
        return (moved.transpose(1, 0, 2).astype(jnp.bfloat16), *[moved] * (times - 1))

    with sharding.mesh(a=8):
        args = jax.ShapeDtypeStruct((32, 64), "float32")
        ledger = sharding.jit(program, in_shardings=P("a")).complete(args).communication()
    assert {c.dtype for c in ledger.lowered("gpu")} == {dtype}
    assert {c.dtype for c in ledger.lowered("cpu")} <= {"float32", dtype}


def picked(z):
    return jax.nn.logsumexp(z, -1) - z[:, 0]


def of_labels(z):
    labels = jnp.arange(len(z)) % z.shape[1]
    return jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], 1)[:, 0]


NORMALIZED = {
    "softmax": (lambda z: jax.nn.softmax(z, -1), "bfloat16"),
    "also summed": (lambda z: jax.nn.logsumexp(z, -1) + z.sum(-1), "bfloat16"),
    "also picked": (picked, "float32"),
    "labels": (of_labels, "float32"),
}
LOGITS = jax.ShapeDtypeStruct((512, 1024), "bfloat16")


@pytest.mark.parametrize("name", NORMALIZED)
def test_tpus_take_maxima_of_logits_in_bfloat16_unless_some_are_picked(name):
    f, dtype = NORMALIZED[name]
    with sharding.mesh(data=2, model=4):
        jitted = sharding.jit(lambda x: f(upcast(x)), in_shardings=P("data", "model"))
        ledger = jitted.complete(LOGITS).communication().lowered("tpu")
    assert [c.dtype for c in ledger if c.op == "reduce_max"] == [dtype]


@pytest.mark.slow
@compilers.needs("libtpu")
@pytest.mark.parametrize("name", NORMALIZED)
def test_the_compiler_for_tpus_does_so(name):
    with sharding.mesh({"data": 2, "model": 4}, devices=cost.compile_only("v5p:2x2x2")):
        step = sharding.jit(lambda x: NORMALIZED[name][0](upcast(x)), in_shardings=P("data", "model"))
        predicted = step.complete(LOGITS).communication().lowered("tpu").by_kind()
        assert predicted == cost.read_compiled(step.lower(LOGITS).compile()).by_kind()
