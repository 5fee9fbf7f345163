"""BERT on text: masked language modeling, one token per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import bert, layouts
from ..batch_rows import select_rows
from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..datasets import standard_library
from ..metrics import bits_per_byte
from ..train_step import train_functions
from ..workload import DeviceMetrics, EvalOutput, Metric, Workload
from .model_family import Family

MASK = standard_library.NUM_TOKENS
"""The mask token."""

MASKED_FRACTION = 0.15
"""Fraction of the bytes of a sequence to predict, rounded to an integer number of bytes."""

REPLACED_BY_MASK, REPLACED_BY_RANDOM = 0.8, 0.1
"""Fractions of these bytes replaced by the mask and by a random byte; the others are unchanged."""

NUM_HELDOUT_TOKENS = 2**16
"""Tokens per evaluation, masked or not, always the same ones."""

LOSS = Metric(name="loss", unit="bits per hidden byte", scale=1 / math.log(2))
HELDOUT = Metric(name="heldout_bits_per_hidden_byte", unit="bits per hidden byte")


@dataclass(frozen=True, kw_only=True)
class MaskedBytes:
    """Batches from a corpus with masked bytes; a function of the seed and the step."""

    corpus: standard_library.Corpus
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
        rows_BS = standard_library.train_batch(
            self.corpus, batch_size=self.batch_size, length=self.length - 1, seed=self.seed, step=step
        )
        # The third number separates this random stream from that of the rows.
        return select_rows(mask(rows_BS, np.random.default_rng((self.seed, step, 1))), rows)

    def heldout_batches(self) -> Sequence[bert.Masked]:
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        batches = standard_library.heldout_batches(
            self.corpus, batch_size=self.batch_size, length=self.length - 1, num_batches=num_batches
        )
        generator = np.random.default_rng(0)
        return [mask(rows, generator) for rows in batches]


def num_masked(length: int) -> int:
    """Number of masked tokens per sequence."""
    return max(1, round(MASKED_FRACTION * length))


def mask(rows: np.ndarray, generator: np.random.Generator) -> bert.Masked:
    """Tokens [B, S] with equally many masked in each row.

    References: Devlin et al., BERT, arXiv:1810.04805, section 3.1 and appendix A.1.
    """
    batch_size, length = rows.shape
    positions = np.argsort(generator.random((batch_size, length)), axis=1)[:, : num_masked(length)]
    positions = np.sort(positions, axis=1).astype(np.int32)
    targets = np.take_along_axis(rows, positions, axis=1)
    draw, other = generator.random(targets.shape), generator.integers(0, standard_library.NUM_TOKENS, targets.shape)
    shown = np.where(draw < REPLACED_BY_MASK + REPLACED_BY_RANDOM, other, targets)
    shown = np.where(draw < REPLACED_BY_MASK, MASK, shown).astype(rows.dtype)
    tokens = rows.copy()
    np.put_along_axis(tokens, positions, shown, axis=1)
    return bert.Masked(tokens, positions, targets)


def build(
    name: str, config: bert.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a BERT on the sources of the Python standard library."""
    init, train_step, merge, _ = train_functions(
        lambda rngs: bert.BERT(config, rngs=rngs),
        bert.masked_loss,
        layout=layouts.bert,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed) if config.dropout else None,
    )

    def evaluate(params: nnx.State, variables: nnx.State, batch: bert.Masked) -> DeviceMetrics:
        return {"nats": bert.masked_loss(merge(params, variables), batch)}

    def batch_shapes(size: int) -> bert.Masked:
        def tokens(length: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size, length), jnp.int32)

        masked = num_masked(config.context)
        return bert.Masked(tokens(config.context), tokens(masked), tokens(masked))

    return Workload(
        name=name,
        config=config,
        summary=f"context {config.context}, {num_masked(config.context)} masked",
        init=init,
        train_step=train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=batch_shapes,
        source=lambda size, seed: MaskedBytes(
            corpus=standard_library.read(), batch_size=size, length=config.context, seed=seed
        ),
        loss=LOSS,
        heldout=(HELDOUT,),
        item="tokens",
        items_per_example=config.context,
    )


def score(batches: Sequence[EvalOutput]) -> dict[str, float]:
    """Bits per masked byte from the mean nats of equally large batches."""
    nats = [float(output["nats"]) for output in batches]
    return {HELDOUT.name: bits_per_byte(sum(nats) / len(nats))}


def recipe(name: str) -> Recipe:
    """The default training settings of a BERT."""
    return Recipe(steps=800, batch=32, optimization=Optimization(lr=2e-3, warmup=100))


FAMILY = Family(presets=bert.PRESETS, recipe=recipe, build=build)
