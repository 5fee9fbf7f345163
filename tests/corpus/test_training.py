"""Small models of other packages, trained for five steps on two meshes: the losses are those of one device."""

import dataclasses
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import corpus
import sharding
from sharding import paths

MESHES = ({"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2})
STEPS = 5
TOLERANCE = 2e-4
"""Relative, of a loss in float32: sums are added in another order."""

SMALL = {"features": 64, "heads": 4, "layers": 2}


def haiku_transformer(adapter, sizes):
    return adapter.transformer(sizes, rows=8, weights=adapter.megatron, stacked=True, **SMALL)


def linen_decoder(adapter, sizes):
    config = adapter.Config(
        vocab=256, mlp=128, context=32, dtype=jnp.float32, dropout=0.0, scan=True, remat=True, **SMALL
    )
    return adapter.trained(adapter.LanguageModel(config), 8, adapter.MEGATRON, sizes)


def equinox_decoder(adapter, sizes):
    weights = partial(adapter.specs_by, adapter.MEGATRON)
    return adapter.decoder(sizes, **SMALL, rows=8, weights=weights, half=False)


def tunix_llama(adapter, sizes):
    options = {"num_layers": 2, "vocab_size": 256, "embed_dim": 64, "hidden_dim": 128}
    options |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 4}
    return adapter.sft(adapter.llama(adapter.LLAMA.llama3p2_1b, **options), 8, 32, sizes)


def penzai_llama(adapter, sizes):
    config = dataclasses.replace(
        adapter.LLAMA,
        num_kv_heads=4,
        query_head_multiplier=1,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=2,
        vocab_size=256,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    return adapter.trained(config, 8, adapter.MEGATRON, sizes, context=32)


def equimo_vit(adapter, sizes):
    return adapter.train(sizes, make=adapter.models.vit_tiny_patch16_224, rows=8, weights=adapter.megatron, image=224)


def distrax_flow(adapter, sizes):
    return adapter.likelihood(partial(adapter.affine_flow, width=64, layers=2), 16, 16, adapter.wide, sizes)


MODELS = {
    "haiku_models": haiku_transformer,
    "flax_linen_models": linen_decoder,
    "equinox_models": equinox_decoder,
    "tunix_models": tunix_llama,
    "penzai_models": penzai_llama,
    "equimo_models": equimo_vit,
    "distrax_models": distrax_flow,
}
"""Adapter -> a small model of its package, sharded over every axis."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapter", sorted(MODELS))
def test_five_steps_have_the_losses_of_one_device(adapter):
    if adapter in corpus.missing():
        pytest.skip(f"not installed: {', '.join(corpus.missing()[adapter])}")
    make = partial(MODELS[adapter], corpus.adapter(adapter))
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = losses(jax.jit(make(MESHES[0]).run), start(make(MESHES[0]).args))
        assert np.isfinite(expected).all() and expected[0] != expected[-1], "the model is not trained"
        for sizes in MESHES:
            with sharding.mesh(sizes):
                step = make(sizes)
                found = losses(sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0), start(step.args))
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


def start(args):
    """Arrays for the shapes of a step: small weights, an optimizer's state of zeros, few token ids."""
    rng = np.random.default_rng(0)

    def array(path, shape):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(1), shape.shape) if shape.shape else jax.random.key(1)
        if jnp.issubdtype(shape.dtype, jnp.floating):
            name = paths.text(path)
            is_optimizer = name.startswith("0/1/") or "optimizer" in name or "opt_state" in name
            values = 0.05 * rng.standard_normal(shape.shape)  # of a model's constants, which are inputs, positive ones
            return jnp.asarray(0 * values if is_optimizer else values if name[0] == "0" else abs(values), shape.dtype)
        if shape.dtype == jnp.bool_:
            return jnp.ones(shape.shape, jnp.bool_)
        return jnp.asarray(rng.integers(1, 16, shape.shape), shape.dtype)

    return jax.tree_util.tree_map_with_path(array, args)


def losses(step, args):
    """The losses of the steps from one state, each with the batch of the first."""
    state, *batch = args
    found = []
    for _ in range(STEPS):
        state, loss = step(state, *batch)[:2]
        found.append(float(jax.tree.leaves(loss)[0]))
    return found
