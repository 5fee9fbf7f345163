"""BERT on text, a byte a token: the hidden bytes from those around them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import bert, layouts
from .. import corpus
from ..config import Optimization, Recipe
from ..metrics import bits_per_byte
from ..rows import taken
from ..task import Figure, Looked, Measured, Task
from ..training import trained
from .family import Family

MASK = corpus.NUM_TOKENS
"""The token in place of a hidden byte."""

HIDDEN_SHARE = 0.15
"""Of the bytes of a sequence, rounded to a whole number of them."""

MASKED, RANDOM = 0.8, 0.1
"""Of the hidden bytes, the shares that are replaced by the mask and by any byte; the others are left as they are."""

NUM_HELDOUT_TOKENS = 2**16
"""Looked at by every evaluation, hidden or not, always the same ones."""

LOSS = Figure(name="loss", unit="bits per hidden byte", scale=1 / math.log(2))
HELDOUT = Figure(name="heldout_bits_per_hidden_byte", unit="bits per hidden byte")


@dataclass(frozen=True, kw_only=True)
class HiddenBytes:
    """Batches from a corpus with some bytes hidden: which ones depends on the seed and the step alone."""

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

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> bert.Masked:
        whole = corpus.train_batch(
            self.corpus, batch_size=self.batch_size, length=self.length - 1, seed=self.seed, step=step
        )
        # A third number keeps the draws apart from those of the rows.
        return taken(hide(whole, np.random.default_rng((self.seed, step, 1))), rows)

    def heldout_batches(self) -> Sequence[bert.Masked]:
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        batches = corpus.heldout_batches(
            self.corpus, batch_size=self.batch_size, length=self.length - 1, num_batches=num_batches
        )
        generator = np.random.default_rng(0)
        return [hide(rows, generator) for rows in batches]


def num_hidden(length: int) -> int:
    """How many tokens of a sequence are hidden."""
    return max(1, round(HIDDEN_SHARE * length))


def hide(rows: np.ndarray, generator: np.random.Generator) -> bert.Masked:
    """Tokens [B, S] with the same number hidden in each row.

    References: Devlin et al., BERT, arXiv:1810.04805, section 3.1 and appendix A.1.
    """
    batch_size, length = rows.shape
    positions = np.argsort(generator.random((batch_size, length)), axis=1)[:, : num_hidden(length)]
    positions = np.sort(positions, axis=1).astype(np.int32)
    targets = np.take_along_axis(rows, positions, axis=1)
    fate, other = generator.random(targets.shape), generator.integers(0, corpus.NUM_TOKENS, targets.shape)
    shown = np.where(fate < MASKED, MASK, np.where(fate < MASKED + RANDOM, other, targets)).astype(rows.dtype)
    tokens = rows.copy()
    np.put_along_axis(tokens, positions, shown, axis=1)
    return bert.Masked(tokens, positions, targets)


def build(
    name: str, config: bert.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a BERT on the sources of the Python standard library."""
    init, train_step, merged, _ = trained(
        lambda rngs: bert.BERT(config, rngs=rngs),
        bert.masked_loss,
        layout=layouts.bert,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed) if config.dropout else None,
    )

    def evaluate(params: nnx.State, variables: nnx.State, batch: bert.Masked) -> Measured:
        return {"nats": bert.masked_loss(merged(params, variables), batch)}

    def batch_shapes(size: int) -> bert.Masked:
        def tokens(length: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, length), jnp.int32)

        hidden = num_hidden(config.context)
        return bert.Masked(tokens(config.context), tokens(hidden), tokens(hidden))

    return Task(
        name=name,
        config=config,
        about=f"context {config.context}, {num_hidden(config.context)} hidden",
        init=init,
        train_step=train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=batch_shapes,
        source=lambda size, seed: HiddenBytes(corpus=corpus.read(), batch_size=size, length=config.context, seed=seed),
        loss=LOSS,
        heldout=(HELDOUT,),
        item="tokens",
        items_per_example=config.context,
    )


def score(batches: Sequence[Looked]) -> dict[str, float]:
    """Bits a hidden byte from the mean nats of batches of the same size."""
    nats = [float(looked["nats"]) for looked in batches]
    return {HELDOUT.name: bits_per_byte(sum(nats) / len(nats))}


def recipe(name: str) -> Recipe:
    """How a BERT is trained by default."""
    return Recipe(steps=800, batch=32, optimization=Optimization(lr=2e-3, warmup=100))


FAMILY = Family(presets=bert.PRESETS, recipe=recipe, build=build)
