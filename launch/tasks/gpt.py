"""GPT on text, a byte a token: the next byte from those before it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import gpt, layouts, transformer
from .. import corpus, tensor_parallel
from ..config import Optimization, Recipe
from ..metrics import bits_per_byte
from ..pipelined import Cut
from ..sequences import Sequences, next_tokens, unsplit
from ..task import Figure, Looked, Measured, Sampler, Task
from ..training import Trained, trained
from .family import Family

NUM_HELDOUT_TOKENS = 2**15
"""Looked at by every evaluation, always the same ones."""

PROMPT = b"\0def "
TEMPERATURE = 0.8

BITS_PER_BYTE = Figure(name="loss", unit="bits per byte", scale=1 / math.log(2))
HELDOUT = Figure(name="heldout_bits_per_byte", unit="bits per byte")


@dataclass(frozen=True, kw_only=True)
class Text:
    """Batches of tokens [B, S + 1] from a corpus: inputs and, shifted by one, targets."""

    corpus: corpus.Corpus
    batch_size: int
    length: int
    seed: int
    name: str = "corpus"

    @property
    def description(self) -> str:
        return str(self.corpus)

    @property
    def sha256(self) -> str:
        return self.corpus.sha256

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> np.ndarray:
        return corpus.train_batch(
            self.corpus, batch_size=self.batch_size, length=self.length, seed=self.seed, step=step, rows=rows
        )

    def heldout_batches(self) -> Sequence[np.ndarray]:
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        return corpus.heldout_batches(
            self.corpus, batch_size=self.batch_size, length=self.length, num_batches=num_batches
        )


def build(name: str, config: gpt.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0) -> Task:
    """The task of training a GPT on the sources of the Python standard library."""
    cut = None
    if optimization.pipeline is not None:
        # Stacked layers are stages as they lie; those that are computed again are so within their stage.
        cut = Cut(
            examples=next_tokens,
            loss=tensor_parallel.loss,
            past=gpt.GPT.past,
            remat=transformer.KEPT if config.remat else None,
        )
        config = replace(config, scan=True)
    stream = tensor_parallel.stream() if optimization.sequence_parallel else transformer.PLAIN
    whole = functools.partial(gpt.GPT, config, stream=stream)
    make, examples = whole, next_tokens
    if optimization.sequence is not None:
        over = Sequences.of(optimization.sequence, config.context)
        make, examples = functools.partial(whole, attention=over.attention, order=over.positions), over.examples

    def loss(model: gpt.GPT, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        inputs, targets = examples(tokens)
        return tensor_parallel.loss(model(inputs, key), targets)

    training = trained(
        lambda rngs: make(rngs=rngs),
        loss,
        layout=layouts.gpt,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed) if config.dropout else None,
        cut=cut,
    )
    return over_text(
        name,
        config,
        training,
        nats=lambda model, tokens: loss(model, tokens, None),
        whole=whole if optimization.sequence is not None else None,
        sample=sample,
    )


def over_text(
    name: str,
    config: gpt.Config,
    training: Trained,
    *,
    nats: Callable[[Any, jax.Array], jax.Array],
    whole: Callable[..., nnx.Module] | None,
    sample: int,
    about: str = "",
) -> Task:
    """The task of training a model that predicts the next byte of the Python standard library's sources.

    Args:
        name: of the model.
        config: its sizes.
        training: of the model.
        nats: model, tokens [B, S + 1] -> mean nats per token without dropout.
        whole: rngs -> the model without an axis that splits sequences, where the model that is trained has one.
        sample: tokens to generate.
        about: what else there is to say of the model.
    """

    def evaluate(params: nnx.State, variables: nnx.State, tokens: jax.Array) -> Measured:
        return {"nats": nats(training.merged(params, variables), tokens)}

    def generate(params: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        model = training.merged(params, nnx.State({}))
        model = model if whole is None else unsplit(model, whole)
        return gpt.generate(model, prompt, steps=sample, key=key, temperature=TEMPERATURE)

    return Task(
        name=name,
        config=config,
        about=f"context {config.context}{about}",
        init=training.init,
        train_step=training.train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=lambda size: jax.ShapeDtypeStruct((size, config.context + 1), jnp.int32),
        source=lambda size, seed: Text(corpus=corpus.read(), batch_size=size, length=config.context, seed=seed),
        loss=BITS_PER_BYTE,
        heldout=(HELDOUT,),
        item="tokens",
        items_per_example=config.context,
        apart=training.apart,
        sampler=Sampler(generate=generate, prompt=np.frombuffer(PROMPT, np.uint8).astype(np.int32), text=as_text),
    )


def score(batches: Sequence[Looked]) -> dict[str, float]:
    """Bits a byte from the mean nats of batches of the same size."""
    nats = [float(looked["nats"]) for looked in batches]
    return {HELDOUT.name: bits_per_byte(sum(nats) / len(nats))}


def as_text(tokens: np.ndarray) -> str:
    """Generated tokens as text, the end of a file as a new line."""
    text = bytes(tokens[1:].astype(np.uint8).tolist())
    return text.replace(b"\0", b"\n").decode(errors="replace")


FAMILY = Family(
    presets=gpt.PRESETS,
    recipe=lambda name: Recipe(sample=256),
    build=build,
    sequences=True,
    text=True,
    sequence_parallel=True,
)
