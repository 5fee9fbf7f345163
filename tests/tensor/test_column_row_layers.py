"""Column- and row-parallel layers equal one device and have the all-reduces that the paper counts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tensor_parallel_reference

import sharding
from sharding import P, ShardingError, tensor
from sharding.cost import read_compiled

ACTIVATION = 4 * tensor_parallel_reference.BATCH * tensor_parallel_reference.LENGTH * tensor_parallel_reference.FEATURES
"""Bytes of b x s x h."""


@functools.cache
def reference(layers=1):
    step = jax.jit(jax.value_and_grad(tensor_parallel_reference.dense_loss))
    return jax.device_get(step(tensor_parallel_reference.params(layers), *tensor_parallel_reference.tokens()))


def check_same(found, expected):
    def close(a, b):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7

    jax.tree.map(close, jax.device_get(found), expected)


def mesh(**sizes):
    return sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("size", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 8))])
def test_values_and_gradients_equal_one_device(size, sequence_parallel):
    with mesh(tensor=size):
        step = sharding.jit(jax.value_and_grad(tensor_parallel_reference.loss_of(sequence_parallel=sequence_parallel)))
        check_same(step(tensor_parallel_reference.params(), *tensor_parallel_reference.tokens()), reference())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_values_and_gradients_equal_one_device_in_plain_jit(sequence_parallel):
    with mesh(data=2, tensor=4):
        step = jax.jit(jax.value_and_grad(tensor_parallel_reference.loss_of(sequence_parallel=sequence_parallel)))
        check_same(
            step(
                tensor_parallel_reference.params(),
                *(sharding.put(x, P("data")) for x in tensor_parallel_reference.tokens()),
            ),
            reference(),
        )


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_four_all_reduces_per_layer(size):
    """Two forward and two backward, of b x s x h each: 8 b s h (t - 1) / t elements sent per layer."""
    large = {}
    for layers in (1, 2):
        with mesh(tensor=size) as current_mesh:
            step = sharding.jit(jax.value_and_grad(tensor_parallel_reference.loss_of()))
            args = tensor_parallel_reference.params(layers), *tensor_parallel_reference.tokens()
            predicted = step.complete(*args).communication()
            found = read_compiled(step.lower(*args).compile(), mesh=current_mesh)
        assert predicted.lowered("cpu").by_kind() == found.by_kind()
        assert {c.kind for c in found.collectives} == {"all-reduce"}
        large[layers] = [c for c in found.collectives if c.result_bytes == ACTIVATION]
        rest = [c.result_bytes for c in found.collectives if c.result_bytes != ACTIVATION]
        assert rest == [4 * tensor_parallel_reference.BATCH * tensor_parallel_reference.LENGTH] * 3  # of the loss
    assert len(large[1]) == 4 + 2  # one for the embedding, one for the input of the logits
    assert len(large[2]) - len(large[1]) == 4
    sent = sum(c.wire_bytes for c in large[2]) - sum(c.wire_bytes for c in large[1])
    assert sent == 2 * ACTIVATION * 4 * (size - 1) / size


def test_a_row_parallel_bias_is_added_once():
    with mesh(tensor=8):
        x, w, bias = jnp.ones((2, 3, 16)), jnp.zeros((16, 4)), jnp.arange(4.0)
        found = sharding.jit(tensor.row_parallel)(x, w, bias)
    np.testing.assert_array_equal(found, np.broadcast_to(np.arange(4.0), (2, 3, 4)))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x, w: tensor.column_parallel(x, w[:, :6]), r"6 output features or heads over tensor=4: 6 = 1 x 4 \+ 2"),
        (lambda x, w: tensor.row_parallel(x[..., :6], w[:6]), "6 input features or heads over tensor=4"),
        (lambda x, w: tensor.column_parallel(x, w[:4]), r"x \(2, 8\), w \(4, 8\)"),
        (lambda x, w: tensor.row_parallel(x, w, jnp.zeros(3)), r"a bias of shape \[\*out\] = \(8,\)"),
        (
            lambda x, w: tensor.column_parallel(x, w, axis="model"),
            r"mesh axes data=2, tensor=4[\s\S]*a mesh axis 'model'",
        ),
    ],
)
def test_errors(call, match):
    with mesh(data=2, tensor=4), pytest.raises(ShardingError, match=match):
        call(jnp.zeros((2, 8)), jnp.zeros((8, 8)))


def test_a_mesh_is_required():
    with pytest.raises(ShardingError, match="no mesh"):
        tensor.row_parallel(jnp.zeros((2, 8)), jnp.zeros((8, 8)))
