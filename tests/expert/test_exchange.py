"""Where there is a ragged all-to-all rows are sent by it, two forward and two backward, as a TPU's compiler agrees."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mixture import layer, value_and_grad

import sharding
from sharding import P
from sharding.cost import compile_only
from sharding.expert import exchange


def lowered(devices):
    """The program of a layer without places, forward and backward, for four devices."""
    made = jax.eval_shape(lambda: layer(features=128, hidden=256, capacity_factor=None))
    x, key = jax.ShapeDtypeStruct((8, 64, 128), jnp.bfloat16), jax.eval_shape(jax.random.key, 0)
    with sharding.mesh(expert=4, devices=devices):
        step = sharding.jit(value_and_grad, in_shardings=(None, P("expert"), None))
        return step.lower(made, x, key)


@pytest.mark.parametrize(("devices", "ragged", "whole"), [("v5p:2x2x1", 4, 0), ("h100:1x4", 4, 0), (4, 0, 4)])
def test_platforms_that_have_ragged_exchanges(devices, ragged, whole):
    text = lowered(devices).as_text()
    assert text.count("@ragged_all_to_all") == ragged
    assert text.count("stablehlo.all_to_all") == whole


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_tpu_compiles_ragged_exchanges():
    text = lowered(compile_only("v5p:2x2x1")).compile().as_text()
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == 4
    assert not re.search(r" all-to-all(?:-start)?\(", text)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` row by row, from everything that everyone has; XLA:CPU has none to compare with."""
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


def test_ragged_rows_are_those_of_whole_blocks(monkeypatch):
    """Its offsets and sizes, by an emulation of the one primitive that this platform lacks."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    chance = np.random.default_rng(0)
    rows, parts, experts = 6, 4, 8
    chosen = np.sort(chance.integers(0, experts + 1, (parts, rows)), axis=1)  # the last number: no expert
    counts = (chosen[..., None] == np.arange(experts)).sum(1).astype(np.int32).reshape(-1)
    values = chance.normal(size=(parts * rows, 3)).astype(np.float32)
    scale = jnp.arange(1.0, experts + 1)

    def compute(rows_RM, count_e):
        first = lax.axis_index("expert") * len(count_e)
        expert = jnp.sum(jnp.arange(len(rows_RM))[:, None] >= jnp.cumsum(count_e)[None, :], axis=1)
        inside = (expert < len(count_e))[:, None]
        return jnp.where(inside, rows_RM * scale[jnp.minimum(first + expert, experts - 1)][:, None], 0)

    def loss(values, counts, ragged):
        here = functools.partial(exchange.at_experts, compute=compute, axis="expert", parts=parts, ragged=ragged)
        out = jax.shard_map(here, in_specs=(P("expert"), P("expert")), out_specs=P("expert"))(values, counts)
        return jnp.sum(out**2), out

    wanted = values * np.append(np.asarray(scale), 0)[chosen.reshape(-1)][:, None]
    with sharding.mesh(expert=parts, devices=jax.devices()[:parts]):
        both = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
        for ragged in (False, True):
            (_, out), gradient = jax.block_until_ready(both(values, counts, ragged))
            np.testing.assert_allclose(out, wanted, rtol=1e-6)
            np.testing.assert_allclose(gradient * values, 2 * wanted**2, rtol=1e-5)
