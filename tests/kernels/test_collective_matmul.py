"""Collective matmul: the numbers and bytes of a collective and a matmul, overlapped where links are asynchronous."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers

import sharding
from sharding import P, ShardingError, cost, kernels
from sharding.compat import HAS_MOSAIC_GPU

RNG = np.random.default_rng(0)


def array(*shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def forward(implementation, dim=-2):
    """Gathered, widened, narrowed and scattered again."""

    def layer(x, w1, w2):
        options = {"axis": "tensor", "dim": dim, "implementation": implementation}
        return kernels.matmul_reduce_scatter(jnp.tanh(kernels.all_gather_matmul(x, w1, **options)), w2, **options)

    def call(x, w1, w2):
        rows = P(*("tensor" if d == dim % x.ndim else None for d in range(x.ndim)))
        specs = (rows, P(None, "tensor"), P("tensor"))
        return jax.shard_map(layer, axis_names={"tensor"}, in_specs=specs, out_specs=rows, check_vma=False)(x, w1, w2)

    return call


def with_gradients(f):
    return jax.value_and_grad(lambda *args: (f(*args).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2))


def branch(implementation, dim=-2):
    return with_gradients(forward(implementation, dim))


def expected(*args):
    return jax.jit(with_gradients(lambda x, w1, w2: jnp.tanh(x @ w1) @ w2))(*args)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_rings_of_all_sizes(devices):
    args = array(2, 2 * devices, 3), array(3, 2 * devices), array(2 * devices, 5)
    with sharding.mesh(tensor=devices, devices=jax.devices()[:devices]):
        found = sharding.jit(branch("ring"))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected(*args))


@pytest.mark.parametrize("shape, dim", [((8, 3), 0), ((8, 4, 3), 0), ((2, 4, 8, 3), 2), ((2, 4, 8, 3), -3)], ids=str)
@pytest.mark.parametrize("implementation", ["ring", "xla"])
def test_rows_of_any_dim(shape, dim, implementation):
    args = array(*shape), array(3, 8), array(8, 5)
    with sharding.mesh(tensor=4, devices=jax.devices()[:4]):
        found = sharding.jit(branch(implementation, dim))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected(*args))


@pytest.mark.skipif(not HAS_MOSAIC_GPU, reason="XLA:CPU of JAX 0.10 merges what travels forward and backward")
def test_beside_other_axes_the_ledger_is_what_is_compiled():
    """Shards travel three times for each of five collectives: two forward, three backward."""
    args = array(4, 16, 8), array(8, 32), array(32, 8)
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(branch("ring"), in_shardings=(P("data", "tensor"), P(None, "tensor"), P("tensor")))
        predicted = step.complete(*args).communication().lowered("cpu").by_kind()
        compiled = cost.read_compiled(step.lower(*args).compile()).by_kind()
        found = step(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected(*args))
    assert predicted == compiled
    assert compiled["collective-permute"] == (15, 15 * 4 * 2 * 4 * 8)


def test_as_many_bytes_as_the_collectives():
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 8), (8, 32), (32, 8))]
    sent = {}
    with sharding.mesh(tensor=4, devices=jax.devices()[:4]):
        for implementation in ("ring", "xla"):
            ledger = sharding.jit(forward(implementation)).complete(*args).communication()
            sent[implementation] = sum(c.wire_bytes for c in ledger)
    assert sent["ring"] == sent["xla"] > 0


@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"], compilers.COMPILERS["gpu"]])
def test_compiled_programs_multiply_while_shards_travel(platform, described):
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((4, 1024, 512), (512, 2048), (2048, 512))]
    with sharding.mesh(data=2, tensor=4, devices=compilers.devices(described)):
        step = sharding.jit(branch("auto"), in_shardings=(P("data", "tensor"), P(None, "tensor"), P("tensor")))
        predicted = step.complete(*args).communication().lowered(platform).by_kind()
        compiled = step.lower(*args).compile()
    assert predicted == cost.read_compiled(compiled).by_kind()
    text = compiled.as_text()
    text = text[text.index("\nENTRY") :]
    ops = re.findall(r"= .*? (collective-permute-start|collective-permute-done|fusion|custom-call|dot)\(", text)
    in_flight, overlapped = 0, 0
    for op in ops:
        in_flight += {"collective-permute-start": 1, "collective-permute-done": -1}.get(op, 0)
        overlapped += in_flight > 0 and not op.startswith("collective")
    assert overlapped >= 5  # XLA:GPU sends several shards in one op


def test_small_types_are_summed_in_float32():
    """Gradients of weights; what is sent has the dtype of the product, as in a reduce-scatter."""
    args = array(2, 512, 8, dtype="bfloat16"), array(8, 4, dtype="bfloat16"), array(4, 8, dtype="bfloat16")
    with sharding.mesh(tensor=4, devices=jax.devices()[:4]):
        _, found = sharding.jit(branch("ring"))(*args)
    _, exact = expected(*(x.astype(jnp.float32) for x in args))
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=0.02 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    "call, complaint",
    [
        (lambda x, w: kernels.all_gather_matmul(x, w, axis="data"), "a call in a shard_map over 'data'"),
        (lambda x, w: kernels.all_gather_matmul(x, w[:2], axis="tensor"), r"x \[..., T, K\], w \[K, N\]"),
        (lambda x, w: kernels.all_gather_matmul(x, w, axis="tensor", dim=-1), "dim=-1"),
        (lambda x, w: kernels.all_gather_matmul(x, w, axis="tensor", implementation="nccl"), "'auto', 'xla', 'ring'"),
        (lambda x, w: kernels.matmul_reduce_scatter(x[:3], w, axis="tensor"), "multiple of 4"),
    ],
)
def test_errors(call, complaint):
    with sharding.mesh(data=2, tensor=4), pytest.raises(ShardingError, match=complaint):
        inside = jax.shard_map(call, axis_names={"tensor"}, in_specs=(P(), P()), out_specs=P(), check_vma=False)
        jax.jit(inside)(array(4, 3), array(3, 8))
