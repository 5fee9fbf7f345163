"""GPT with mixtures of experts on text, a byte a token: how evenly the experts are used is in the metrics."""

import functools

import jax
import jax.numpy as jnp

from ...models import gpt_moe, layouts
from ..config import Optimization, Recipe
from ..sequences import Sequences, next_tokens
from ..task import Task
from ..training import Lowered, trained
from .family import Family
from .gpt import over_text


def build(
    name: str, config: gpt_moe.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a GPT with experts on the sources of the Python standard library."""
    whole = functools.partial(gpt_moe.GPTMoE, config)
    make, examples = whole, next_tokens
    if optimization.sequence is not None:
        # Experts have places for the first tokens that come.
        over = Sequences.of(optimization.sequence, config.context, in_order=True)
        make, examples = functools.partial(whole, attention=over.attention), over.examples
    training = trained(
        lambda rngs: make(rngs=rngs),
        lambda model, tokens, key: loss(model, *examples(tokens), key),
        layout=layouts.gpt_moe,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed),
    )
    return over_text(
        name,
        config,
        training,
        nats=lambda model, tokens: gpt_moe.loss(model, *examples(tokens))[0],
        whole=whole if optimization.sequence is not None else None,
        sample=sample,
        about=f", {config.num_experts} experts in every other layer",
    )


def loss(model: gpt_moe.GPTMoE, tokens_BS: jax.Array, targets_BS: jax.Array, key: jax.Array | None) -> Lowered:
    """Nats and the auxiliary losses of all layers; of the busiest layer's experts the busiest over the mean one."""
    nats, balance = gpt_moe.loss(model, tokens_BS, targets_BS, key)
    auxiliary = jnp.sum(balance.auxiliary_loss)
    figures = {
        "loss": nats,
        "auxiliary_loss": auxiliary,
        "peak_load": jnp.max(balance.peak_load),
        "dropped_share": balance.dropped_share,
    }
    return Lowered(nats + auxiliary, figures)


FAMILY = Family(
    presets=gpt_moe.PRESETS,
    recipe=lambda name: Recipe(sample=256),
    build=build,
    axes=("expert",),
    sequences=True,
    text=True,
)
