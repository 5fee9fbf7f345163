"""GPT with mixtures of experts on text, one token per byte, with load-balance metrics."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from ...models import gpt, gpt_moe, layouts
from ...models.remat_policy import policies
from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..expert_stats import ExpertStats
from ..pipelined_step import LayerStats, StagedLoss
from ..sharded_sequences import ShardedSequences, next_tokens
from ..train_step import train_functions
from ..workload import LossOutput, Workload
from .gpt_text import language_model_workload
from .model_family import Family


def build(
    name: str, config: gpt_moe.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a GPT with experts on the sources of the Python standard library."""
    staged = None
    if optimization.pipeline is not None:
        # Stacked pairs of blocks need no copy to become stages.
        staged = StagedLoss(
            examples=next_tokens,
            loss=gpt.loss,
            layer_stats=LayerStats(
                initial=ExpertStats(*[jnp.zeros(())] * 4),
                add=lambda stats, balance: stats.add(balance),
                loss_output=loss_output,
            ),
            remat=next(iter(policies(config.remat)), None),
        )
        config = replace(config, scan=True)
    plain_model = functools.partial(gpt_moe.GPTMoE, config)
    make, examples = plain_model, next_tokens
    if optimization.sequence is not None:
        # Expert capacity goes to the first tokens of a sequence, so their order matters.
        sequences = ShardedSequences.of(optimization.sequence, config.context, in_order=True)
        make, examples = functools.partial(plain_model, attention=sequences.attention), sequences.examples
    training = train_functions(
        lambda rngs: make(rngs=rngs),
        lambda model, tokens, key: loss(model, *examples(tokens), key),
        layout=layouts.gpt_moe,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed),
        staged=staged,
    )
    return language_model_workload(
        name,
        config,
        training,
        nats=lambda model, tokens: gpt_moe.loss(model, *examples(tokens))[0],
        plain_model=plain_model if optimization.sequence is not None else None,
        sample=sample,
        summary=f", {config.num_experts} experts in every other layer",
    )


def loss(model: gpt_moe.GPTMoE, tokens_BS: jax.Array, targets_BS: jax.Array, key: jax.Array | None) -> LossOutput:
    """Nats plus the auxiliary losses of all layers, with expert-load metrics."""
    nats, balance = gpt_moe.loss(model, tokens_BS, targets_BS, key)
    return loss_output(nats, ExpertStats.of(balance))


def loss_output(nats: jax.Array, stats: ExpertStats) -> LossOutput:
    """The differentiated loss and the metrics, from the statistics of all layers."""
    metrics = {
        "loss": nats,
        "auxiliary_loss": stats.auxiliary_loss,
        "peak_load": stats.peak_load,
        "dropped_share": stats.dropped / stats.choices,
    }
    return LossOutput(nats + stats.auxiliary_loss, metrics)


FAMILY = Family(
    presets=gpt_moe.PRESETS,
    recipe=lambda name: Recipe(sample=256),
    build=build,
    axes=("expert",),
    sequences=True,
    text=True,
)
