"""GPT with mixtures of experts on text, a byte a token: how evenly the experts are used is in the metrics."""

import functools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sharding import expert

from ...models import gpt, gpt_moe, layouts, transformer
from ..config import Optimization, Recipe
from ..pipelined import Cut, Tally
from ..sequences import Sequences, next_tokens
from ..task import Lowered, Task
from ..training import trained
from .family import Family
from .gpt import over_text


def build(
    name: str, config: gpt_moe.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a GPT with experts on the sources of the Python standard library."""
    cut = None
    if optimization.pipeline is not None:
        # Stacked pairs are stages as they lie.
        cut = Cut(
            examples=next_tokens,
            loss=gpt.loss,
            tally=Tally(start=Use(*[jnp.zeros(())] * 4), add=lambda so_far, said: so_far.and_of(said), lowered=lowered),
            remat=transformer.KEPT if config.remat else None,
        )
        config = replace(config, scan=True)
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
        cut=cut,
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


class Use(NamedTuple):
    """How layers use their experts; float32."""

    auxiliary_loss: jax.Array
    peak_load: jax.Array
    """Of the busiest layer."""
    dropped: jax.Array
    choices: jax.Array

    @classmethod
    def of(cls, balance: expert.Balance) -> "Use":
        """That of one layer, or of many stacked."""
        counts = jnp.sum(balance.dropped), jnp.sum(balance.load)
        dropped, choices = (count.astype(jnp.float32) for count in counts)
        return cls(jnp.sum(balance.auxiliary_loss), jnp.max(balance.peak_load), dropped, choices)

    def and_of(self, balance: expert.Balance) -> "Use":
        """With that of other layers."""
        more = Use.of(balance)
        return Use(
            self.auxiliary_loss + more.auxiliary_loss,
            jnp.maximum(self.peak_load, more.peak_load),
            self.dropped + more.dropped,
            self.choices + more.choices,
        )


def loss(model: gpt_moe.GPTMoE, tokens_BS: jax.Array, targets_BS: jax.Array, key: jax.Array | None) -> Lowered:
    """Nats and the auxiliary losses of all layers; of the busiest layer's experts the busiest over the mean one."""
    nats, balance = gpt_moe.loss(model, tokens_BS, targets_BS, key)
    return lowered(nats, Use.of(balance))


def lowered(nats: jax.Array, use: Use) -> Lowered:
    """What training lowers where all layers use their experts so."""
    figures = {
        "loss": nats,
        "auxiliary_loss": use.auxiliary_loss,
        "peak_load": use.peak_load,
        "dropped_share": use.dropped / use.choices,
    }
    return Lowered(nats + use.auxiliary_loss, figures)


FAMILY = Family(
    presets=gpt_moe.PRESETS,
    recipe=lambda name: Recipe(sample=256),
    build=build,
    axes=("expert",),
    sequences=True,
    text=True,
)
