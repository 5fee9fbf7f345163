"""GPT with mixtures of experts on text, a byte a token: how evenly the experts are used is in the metrics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import gpt, gpt_moe, layouts
from .. import corpus
from ..config import Optimization, Recipe
from ..sequences import Sequences, unsplit
from ..task import Measured, Sampler, Task
from ..training import Lowered, trained
from .family import Family
from .gpt import BITS_PER_BYTE, HELDOUT, PROMPT, TEMPERATURE, Text, as_text, score


def build(
    name: str, config: gpt_moe.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a GPT with experts on the sources of the Python standard library."""
    whole = functools.partial(gpt_moe.GPTMoE, config)
    make, examples = whole, _next_tokens
    if optimization.sequence is not None:
        # Experts have places for the first tokens that come.
        over = Sequences.of(optimization.sequence, config.context, in_order=True)
        make, examples = functools.partial(whole, attention=over.attention), over.examples
    init, train_step, merged, _ = trained(
        lambda rngs: make(rngs=rngs),
        lambda model, tokens, key: loss(model, *examples(tokens), key),
        layout=layouts.gpt_moe,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed),
    )

    def evaluate(params: nnx.State, variables: nnx.State, tokens: jax.Array) -> Measured:
        return {"nats": gpt_moe.loss(merged(params, variables), *examples(tokens))[0]}

    def generate(params: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        model = merged(params, nnx.State({}))
        if optimization.sequence is not None:
            model = unsplit(model, whole)
        return gpt.generate(model, prompt, steps=sample, key=key, temperature=TEMPERATURE)

    return Task(
        name=name,
        config=config,
        about=f"context {config.context}, {config.num_experts} experts in every other layer",
        init=init,
        train_step=train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=lambda size: jax.ShapeDtypeStruct((size, config.context + 1), jnp.int32),
        source=lambda size, seed: Text(corpus=corpus.read(), batch_size=size, length=config.context, seed=seed),
        loss=BITS_PER_BYTE,
        heldout=(HELDOUT,),
        item="tokens",
        items_per_example=config.context,
        sampler=Sampler(generate=generate, prompt=np.frombuffer(PROMPT, np.uint8).astype(np.int32), text=as_text),
    )


def _next_tokens(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens[:, :-1], tokens[:, 1:]


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
