"""GPT on text: next-byte prediction, one token per byte."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sharding import kernels

from ...models import gpt, layouts, text_generation, transformer_block
from ...models.remat_policy import policies
from .. import tensor_parallel
from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..datasets import standard_library
from ..metrics import bits_per_byte
from ..pipelined_step import StagedLoss
from ..sharded_sequences import ShardedSequences, next_tokens, without_sequence_axis
from ..train_step import TrainFunctions, train_functions
from ..workload import DeviceMetrics, EvalOutput, Metric, Sampler, Workload
from .model_family import Family

NUM_HELDOUT_TOKENS = 2**15
"""Tokens per evaluation, always the same ones."""

PROMPT = b"\0def "
TEMPERATURE = 0.8

BITS_PER_BYTE = Metric(name="loss", unit="bits per byte", scale=1 / math.log(2))
HELDOUT = Metric(name="heldout_bits_per_byte", unit="bits per byte")


@dataclass(frozen=True, kw_only=True)
class CorpusText:
    """Batches of tokens [B, S + 1] from a corpus: inputs and the targets, shifted by one."""

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

    def train_batch(self, step: int, rows: np.ndarray | None = None) -> np.ndarray:
        return standard_library.train_batch(
            self.corpus, batch_size=self.batch_size, length=self.length, seed=self.seed, step=step, rows=rows
        )

    def heldout_batches(self) -> Sequence[np.ndarray]:
        num_batches = max(1, NUM_HELDOUT_TOKENS // (self.batch_size * self.length))
        return standard_library.heldout_batches(
            self.corpus, batch_size=self.batch_size, length=self.length, num_batches=num_batches
        )


def build(
    name: str, config: gpt.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a GPT on the sources of the Python standard library."""
    staged = None
    if optimization.pipeline is not None:
        # Stacked layers need no copy to become stages; remat happens inside each stage.
        staged = StagedLoss(
            examples=next_tokens,
            loss=tensor_parallel.loss,
            past=gpt.GPT.past,
            remat=next(iter(policies(config.remat)), None),
        )
        config = replace(config, scan=True)
    stream = tensor_parallel.stream() if optimization.sequence_parallel else transformer_block.NO_HOOKS
    plain_model = functools.partial(gpt.GPT, config, stream=stream)
    make, examples = plain_model, next_tokens
    if optimization.sequence is not None:
        sequences = ShardedSequences.of(optimization.sequence, config.context)
        make = functools.partial(plain_model, attention=sequences.attention, token_positions=sequences.positions)
        examples = sequences.examples

    def loss(model: gpt.GPT, tokens: jax.Array, key: jax.Array | None) -> jax.Array:
        inputs, targets = examples(tokens)
        if kernels.runs_kernels(config.kernels):
            return model.cross_entropy(inputs, targets, key)
        return tensor_parallel.loss(model(inputs, key), targets)

    training = train_functions(
        lambda rngs: make(rngs=rngs),
        loss,
        layout=layouts.gpt,
        optimization=optimization,
        steps=steps,
        key=jax.random.key(seed) if config.dropout else None,
        staged=staged,
    )
    return language_model_workload(
        name,
        config,
        training,
        nats=lambda model, tokens: loss(model, tokens, None),
        plain_model=plain_model if optimization.sequence is not None else None,
        sample=sample,
    )


def language_model_workload(
    name: str,
    config: gpt.Config,
    training: TrainFunctions,
    *,
    nats: Callable[[Any, jax.Array], jax.Array],
    plain_model: Callable[..., nnx.Module] | None,
    sample: int,
    summary: str = "",
) -> Workload:
    """The workload of a model that predicts the next byte of the Python standard library's sources.

    Args:
        name: the model's name.
        config: the model's configuration.
        training: the functions that train it.
        nats: model, tokens [B, S + 1] -> mean nats per token without dropout.
        plain_model: rngs -> the model without sequence parallelism, if it is trained with it.
        sample: tokens to generate.
        summary: appended to the workload's summary.
    """

    def evaluate(params: nnx.State, variables: nnx.State, tokens: jax.Array) -> DeviceMetrics:
        return {"nats": nats(training.merge(params, variables), tokens)}

    def generate(params: nnx.State, prompt: jax.Array, key: jax.Array) -> jax.Array:
        model = training.merge(params, nnx.State({}))
        model = model if plain_model is None else without_sequence_axis(model, plain_model)
        return text_generation.generate(model, prompt, steps=sample, key=key, temperature=TEMPERATURE)

    return Workload(
        name=name,
        config=config,
        summary=f"context {config.context}{summary}",
        init=training.init,
        train_step=training.train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=lambda size: jax.ShapeDtypeStruct((size, config.context + 1), jnp.int32),
        source=lambda size, seed: CorpusText(
            corpus=standard_library.read(), batch_size=size, length=config.context, seed=seed
        ),
        loss=BITS_PER_BYTE,
        heldout=(HELDOUT,),
        item="tokens",
        items_per_example=config.context,
        mpmd_step=training.mpmd_step,
        sampler=Sampler(generate=generate, prompt=np.frombuffer(PROMPT, np.uint8).astype(np.int32), decode=decode),
    )


def score(batches: Sequence[EvalOutput]) -> dict[str, float]:
    """Bits per byte from the mean nats of equally large batches."""
    nats = [float(output["nats"]) for output in batches]
    return {HELDOUT.name: bits_per_byte(sum(nats) / len(nats))}


def decode(tokens: np.ndarray) -> str:
    """Generated tokens as text; the end of a file becomes a newline."""
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
