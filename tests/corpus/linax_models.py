"""Linax: state-space models over long sequences, whose recurrences are associative scans."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from linax.encoder import LinearEncoderConfig
from linax.heads.classification import ClassificationHeadConfig
from linax.models import LinOSSConfig, LRUConfig, S5Config
from linax.sequence_mixers.linoss import LinOSSSequenceMixerConfig
from linax.sequence_mixers.lru import LRUSequenceMixerConfig
from linax.sequence_mixers.s5 import S5SequenceMixerConfig
from support.train_steps.step import Sizes, Step

from sharding import P

from . import MakeProgram
from .common import KEY, Rules, floats, ints, replicated, specs_by
from .equinox_vision import stateful_step

PACKAGE = "linax"


def classifier_loss(model: Any, state: eqx.nn.State, x: jax.Array, label: jax.Array, key: jax.Array) -> Any:
    """The mean of each sequence's negative log-probability, and the new state of the batch norms."""
    keys = jax.random.split(key, len(x))
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    log_probabilities, state = batched(x, state, keys)
    return -jnp.take_along_axis(log_probabilities, label[:, None], 1).mean(), state


def classifier(
    sizes: Sizes, *, config: Any, mixer: Any, width: int, rows: int, length: int, blocks: int, weights: Any
) -> Step:
    """The train step of a classifier of sequences with 64 channels."""
    encoder = LinearEncoderConfig(in_features=64, out_features=width)
    head = ClassificationHeadConfig(out_features=100, reduce=True)
    options = {"encoder_config": encoder, "head_config": head, "sequence_mixer_config": mixer}

    def make(key: jax.Array) -> Any:
        return eqx.nn.make_with_state(config(num_blocks=blocks, **options).build)(key=key)

    batch = floats(rows, length, 64), ints(rows), KEY
    return stateful_step(make, classifier_loss, batch, sizes, weights, optax.adamw(1e-3))


# The states are sharded.
STATES: Rules = (
    ("*/sequence_mixer/B*", P("model", None)),
    ("*/sequence_mixer/C*", P(None, "model")),
)

PROGRAMS: dict[str, MakeProgram] = {
    "s5": partial(
        classifier,
        config=S5Config,
        mixer=S5SequenceMixerConfig(state_dim=512, ssm_blocks=8),
        width=512,
        rows=32,
        length=4096,
        blocks=4,
        weights=replicated,
    ),
    "lru": partial(
        classifier,
        config=LRUConfig,
        mixer=LRUSequenceMixerConfig(state_dim=1024),
        width=1024,
        rows=32,
        length=2048,
        blocks=4,
        weights=partial(specs_by, STATES),
    ),
    "linoss": partial(
        classifier,
        config=LinOSSConfig,
        mixer=LinOSSSequenceMixerConfig(state_dim=512),
        width=512,
        rows=32,
        length=2048,
        blocks=4,
        weights=replicated,
    ),
}
