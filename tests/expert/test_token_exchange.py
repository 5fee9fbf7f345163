"""Dropless exchange uses ragged all-to-alls where the platform has them, two forward and two backward."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.expert_reference import layer, value_and_grad

import sharding
from sharding import P
from sharding.cost import compile_only
from sharding.expert import token_exchange


def lower_step(devices):
    """The lowered step of a dropless layer, forward and backward, for four devices."""
    moe = jax.eval_shape(lambda: layer(features=128, hidden=256, capacity_factor=None))
    x, key = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16), jax.eval_shape(jax.random.key, 0)
    with sharding.mesh(expert=4, devices=devices):
        step = sharding.jit(value_and_grad, in_shardings=(None, P("expert"), None))
        return step.lower(moe, x, key)


@pytest.mark.parametrize(("devices", "ragged", "padded"), [("v5p:2x2x1", 4, 0), ("h100:1x4", 4, 0), (4, 0, 4)])
def test_ragged_all_to_all_by_platform(devices, ragged, padded):
    text = lower_step(devices).as_text()
    assert text.count("@ragged_all_to_all") == ragged
    assert text.count("stablehlo.all_to_all") == padded


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_ragged_all_to_all_compiles_for_tpus():
    text = lower_step(compile_only("v5p:2x2x1")).compile().as_text()
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == 4
    assert not re.search(r" all-to-all(?:-start)?\(", text)
    assert "tpu_custom_call" in text  # grouped matmuls


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` emulated with all-gathers; XLA:CPU has no implementation to compare with."""
    rows, froms, sizes, tos = (
        lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, place = lax.axis_index(axis_name), jnp.arange(len(output))
    for source in range(len(sizes)):
        offset = place - tos[source, me]
        here = (offset >= 0) & (offset < sizes[source, me])
        row = rows[source][jnp.clip(froms[source, me] + offset, 0, rows.shape[1] - 1)]
        output = jnp.where(here[:, None], row, output)
    return output


def test_ragged_exchange_equals_padded_exchange(monkeypatch):
    """Checks offsets and sizes by emulating the one primitive that this platform lacks.

    Rows of no expert return as zeros, whatever is computed for padding.
    """
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    generator = np.random.default_rng(0)
    rows, parts, experts = 6, 4, 8
    chosen = np.sort(generator.integers(0, experts + 1, (parts, rows)), axis=1)  # the last index: no expert
    counts = (chosen[..., None] == np.arange(experts)).sum(1).astype(np.int32).reshape(-1)
    values = generator.normal(size=(parts * rows, 3)).astype(np.float32)
    scale = jnp.arange(1.0, experts + 1)

    def compute(rows_RM, count_e):
        first = lax.axis_index("expert") * len(count_e)
        expert = jnp.sum(jnp.arange(len(rows_RM))[:, None] >= jnp.cumsum(count_e)[None, :], axis=1)
        inside = (expert < len(count_e))[:, None]
        return jnp.where(inside, rows_RM * scale[jnp.minimum(first + expert, experts - 1)][:, None], 99)

    def loss(values, counts, ragged):
        here = functools.partial(
            token_exchange.run_on_expert_devices, compute=compute, axis="expert", parts=parts, ragged=ragged
        )
        out = jax.shard_map(here, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))(values, counts)
        return jnp.sum(out**2), out

    expected = values * np.append(np.asarray(scale), 0)[chosen.reshape(-1)][:, None]
    with sharding.mesh(expert=parts, devices=jax.devices()[:parts]):
        both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
        for ragged in (False, True):
            (_, out), gradient = jax.block_until_ready(both(values, counts, ragged))
            np.testing.assert_allclose(out, expected, rtol=1e-6)
            np.testing.assert_allclose(gradient * values, 2 * expected**2, rtol=1e-5)
