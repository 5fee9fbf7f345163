"""DeepSpeed's memory flags: which bytes of a transformer layer each leaves out, by policies of `jax.checkpoint`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compilers

import sharding
from sharding import P, ShardingError, cost, kernels
from sharding.kernels.saved_names import NAMES

HEADS = 4
POLICIES = jax.checkpoint_policies


def layer(params, x_BSM, key, *, keep="input", implementation="xla"):
    """A transformer layer of kernels, with dropout of the weights of its attention."""
    run = {"implementation": implementation}
    batch, length, features = x_BSM.shape
    h_BSM = kernels.layer_norm(x_BSM, params["scale1"], params["bias1"], keep=keep, **run)
    q, k, v = ((h_BSM @ params[name]).reshape(batch, length, HEADS, -1).swapaxes(1, 2) for name in ("wq", "wk", "wv"))
    weight_BHST = kernels.scaled_softmax(q @ k.swapaxes(2, 3), scale=(features / HEADS) ** -0.5, **run)
    weight_BHST = kernels.dropout(weight_BHST, key, rate=0.1, **run)
    x_BSM += (weight_BHST @ v).swapaxes(1, 2).reshape(x_BSM.shape) @ params["wo"]
    h_BSM = kernels.layer_norm(x_BSM, params["scale2"], params["bias2"], keep=keep, **run)
    return x_BSM + kernels.bias_gelu_dropout(h_BSM @ params["w1"], params["bias_F"], **run) @ params["w2"]


def arguments(batch=2, length=16, features=32, dtype="float32", make=jnp.ones):
    hidden = 4 * features
    params = {name: make((features, features), dtype) for name in ("wq", "wk", "wv", "wo")}
    params |= {"w1": make((features, hidden), dtype), "w2": make((hidden, features), dtype)}
    params |= {name: make((features,), dtype) for name in ("scale1", "bias1", "scale2", "bias2")}
    return params | {"bias_F": make((hidden,), dtype)}, make((batch, length, features), dtype)


def random(shape, dtype):
    numbers = jax.random.normal(jax.random.key(sum(shape)), shape, dtype)
    return numbers / shape[0] ** 0.5 if len(shape) > 1 else 1 + 0.1 * numbers


def saved_bytes(f, *args):
    """Bytes that a function's derivative takes beside its arguments."""
    known = [x for x in jax.tree.leaves(args) if hasattr(x, "shape")]
    _, pullback = jax.vjp(f, *args)
    kept = [x for x in jax.tree.leaves(pullback) if hasattr(x, "nbytes")]
    return sum(x.nbytes for x in kept if not any(x is y for y in known))


def of_policy(policy, implementation, **options):
    run = functools.partial(layer, key=jax.random.key(1), implementation=implementation, **options)
    return jax.checkpoint(run, policy=policy)


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "mosaic_tpu"])
BATCH, LENGTH, FEATURES = 2, 16, 32
STREAM, HIDDEN, SCORES = (4 * BATCH * LENGTH * n for n in (FEATURES, 4 * FEATURES, HEADS * LENGTH))
"""Bytes of arrays of the layer."""


@pytest.mark.parametrize(
    "names, by_kernels, by_plain_jax",
    [
        (["gelu_output"], HIDDEN, HIDDEN),
        # The softmax of plain JAX keeps its scores, and now its output, too.
        pytest.param(["dropout_output"], SCORES, 0, marks=pytest.mark.slow),
        (["dropout_output", "softmax_output"], SCORES, SCORES),
        (["gelu_output", "dropout_output"], HIDDEN + SCORES, HIDDEN),
        (["norm_output"], 2 * STREAM, 2 * STREAM),
    ],
    ids=str,
)
def test_names_left_out(names, by_kernels, by_plain_jax):
    args = arguments()
    for implementation, left_out in (("mosaic_tpu", by_kernels), ("xla", by_plain_jax)):
        everything = saved_bytes(of_policy(kernels.save_all_but(), implementation), *args)
        assert everything - saved_bytes(of_policy(kernels.save_all_but(*names), implementation), *args) == left_out


@IMPLEMENTATIONS
def test_invertible_norms(implementation):
    """A norm's input is what it is called with, an array less each; a float per row is added."""
    args = arguments()
    policy = kernels.save_all_but()
    by_input = saved_bytes(of_policy(policy, implementation), *args)
    by_output = saved_bytes(of_policy(policy, implementation, keep="output"), *args)
    assert by_input - by_output == 2 * STREAM - 2 * 4 * BATCH * LENGTH


@IMPLEMENTATIONS
def test_policies_of_jax(implementation):
    """`save_only_these_names` saves these, `save_any_names_but_these` all named but these."""
    args = arguments()
    nothing = saved_bytes(of_policy(POLICIES.nothing_saveable, implementation), *args)
    only = saved_bytes(of_policy(POLICIES.save_only_these_names("gelu_output"), implementation), *args)
    assert only - nothing == HIDDEN
    named = saved_bytes(of_policy(POLICIES.save_any_names_but_these(), implementation), *args)
    fewer = saved_bytes(of_policy(POLICIES.save_any_names_but_these("gelu_output"), implementation), *args)
    assert named - fewer == HIDDEN


@IMPLEMENTATIONS
@pytest.mark.parametrize("keep", [pytest.param("input", marks=pytest.mark.slow), "output"])
def test_gradients_do_not_depend_on_what_is_saved(keep, implementation):
    args = arguments(make=random)

    def loss(f):
        return jax.grad(lambda params, x: jnp.sin(f(params, x)).mean())(*args)

    expected = loss(functools.partial(layer, key=jax.random.key(1)))
    for names in ([], list(NAMES)):
        found = loss(of_policy(kernels.save_all_but(*names), implementation, keep=keep))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * abs(b).max()), found, expected)


FLAGS = {"gelu_checkpoint": "gelu_output", "attn_dropout_checkpoint": "dropout_output", "normalize_invertible": None}


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "described"), [compilers.COMPILERS["tpu"], compilers.COMPILERS["gpu"]])
@pytest.mark.parametrize("flag", FLAGS)
def test_compiled_bytes(platform, described, flag):
    """Of scanned layers, each flag takes off what it leaves out of every layer."""
    del platform
    num_layers, sizes = 8, {"batch": 32, "length": 512, "features": 512}
    temp = {}
    for names, keep in (((), "input"), ((FLAGS[flag],), "input") if FLAGS[flag] else ((), "output")):
        one = functools.partial(layer, keep=keep, implementation="auto")
        one = jax.checkpoint(one, policy=kernels.save_all_but(*names))

        def loss(params, x, key, one=one):
            x, _ = jax.lax.scan(lambda x, own: (one(own, x, key), None), x, params)
            return x.astype(jnp.float32).sum()

        params, x = arguments(**sizes, dtype="bfloat16", make=jax.ShapeDtypeStruct)
        params = jax.tree.map(lambda y: jax.ShapeDtypeStruct((num_layers, *y.shape), y.dtype), params)
        key = jax.eval_shape(lambda: jax.random.key(0))
        with sharding.mesh(data=8, devices=cost.compile_only(described)):
            step = sharding.jit(jax.grad(loss), in_shardings=(P(), P("data"), P()))
            temp[names, keep] = step.lower(params, x, key).compile().memory_analysis().temp_size_in_bytes
    token = {"gelu_output": 4 * 512, "dropout_output": HEADS * 512, None: 2 * 512}[FLAGS[flag]] * 2
    before, after = temp.values()
    left_out = num_layers * token * sizes["batch"] * sizes["length"] / 8
    assert 0.95 < (before - after) / left_out < 1.15


def test_errors():
    with pytest.raises(ShardingError, match="names of values"):
        kernels.save_all_but(jax.checkpoint_policies.dots_saveable)
