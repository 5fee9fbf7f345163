"""Data, FSDP and tensor parallelism of a GPT on four CPU devices: ours, PyTorch's, and one device, in one run.

    python -m tests.benchmarks.axes                              # some 10 minutes; installs PyTorch separately
    python -m tests.benchmarks.axes --peer "" --json result.json # ours alone

A GPT of 6.8 million parameters, 8 layers and 256 tokens of context, with a batch of 16. `contenders` describes how they
are measured. Data parallelism and one device are measured with the full batch and with microbatches. PyTorch runs
eagerly (DDP, FSDP2, DTensor) and with compiled blocks, and the faster counts. Each of the four devices has one thread
in both libraries, one device alone as many threads as cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro
from flax import nnx

import sharding
from sharding import tensor
from sharding.models import gpt, layouts

from . import gpt_workload
from .contenders import (
    DEVICES,
    Contender,
    Rounds,
    alternate,
    machine,
    medians,
    rounded,
    seconds,
    start,
    updated,
    value_and_grad,
    write,
)

AXES = ("data", "fsdp", "tensor")
PARTS = 4
"""Number of microbatches."""
IN_PARTS = f", {PARTS} microbatches"
"""Suffix of an axis: gradients are accumulated over microbatches."""


@dataclass(frozen=True, kw_only=True)
class Options(Rounds):
    """What to measure."""

    axes: tuple[str, ...] = AXES
    json: Path | None = None
    """Where to write the figures."""


def parallel(name: str) -> Contender:
    """A mesh with one axis over all devices."""
    axis = name.removesuffix(IN_PARTS)
    graph, params = nnx.split(gpt_workload.model(), nnx.Param)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, layouts.gpt((axis,)).annotate(params))
        if axis == "tensor":
            return tensor.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        return gpt.next_token_loss(model, tokens)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = value_and_grad(loss_of, PARTS if axis != name else 1)(state[0], tokens)
        return updated(*state, gradients), loss

    mesh = {axis: DEVICES}
    with sharding.mesh(mesh):
        run = sharding.jit(step, in_shardings=(None, layouts.batch(mesh)), donate_argnums=0)

        def once(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
            with sharding.mesh(mesh):
                return run(state, tokens)

        return Contender(name=name, step=once, state=(params, gpt_workload.OPTIMIZER.init(params)))


def names(options: Options) -> list[str]:
    """Names of our contenders."""
    return [name for axis in options.axes for name in (axis, *([axis + IN_PARTS] if axis == "data" else []))]


def ours(options: Options) -> list[Contender]:
    """Our contenders, run over all tokens in alternation."""
    found = [parallel(name) for name in names(options)]
    alternate(found, options.tokens(), options.rounds)
    return found


def main(options: Options) -> None:
    """Measures, prints and writes the figures."""
    middle = medians(seconds(options, lambda: ours(options), "torch_axes.py", parts=(1, PARTS)))

    def best(name: str) -> float | None:
        return min((middle[each] for each in (name, f"{name}, compiled") if each in middle), default=None)

    ratios = {}
    for name in names(options):
        mine, peer, alone = middle[f"ours, {name}"], best(f"PyTorch, {name}"), best("PyTorch, single")
        ratios[f"{name}: ours over one device"] = mine / middle["ours, single"]
        if name.endswith(IN_PARTS):
            ratios[f"{name}: ours over one device, too"] = mine / middle[f"ours, single{IN_PARTS}"]
        if peer is not None and alone is not None:
            ratios[f"{name}: PyTorch over one device"] = peer / alone
            ratios[f"{name}: ours over PyTorch"] = mine / peer
    write({"machine": machine(), "seconds": rounded(middle, 4), "ratios": rounded(ratios, 3)}, options.json)


if __name__ == "__main__":
    chosen = tyro.cli(Options)
    start()
    main(chosen)
