"""A GPT whose batch, parameters or layers four CPU devices split: ours, PyTorch's, and one device, in one run.

    python -m tests.benchmarks.axes                              # some 10 minutes; installs PyTorch apart
    python -m tests.benchmarks.axes --peer "" --json result.json # ours alone

A step is of a batch of 16: 6.8 million parameters, 8 layers, 256 tokens. How contenders are measured `contenders` says.
Data is measured with the batch at once and in microbatches, and so is one device.
PyTorch runs as it is (DDP, FSDP2, DTensor) and with its blocks compiled, and its better one counts. Each of the four
has one thread on either side, one device alone as many as there are cores.
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

from . import workload
from .contenders import (
    DEVICES,
    Contender,
    Rounds,
    in_turns,
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
"""Microbatches, where there are any."""
IN_PARTS = f", {PARTS} microbatches"
"""Behind an axis: gradients are those of microbatches, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Options(Rounds):
    """What to measure, and how often."""

    axes: tuple[str, ...] = AXES
    json: Path | None = None
    """Where to write the figures."""


def split(name: str) -> Contender:
    """One axis over all devices."""
    axis = name.removesuffix(IN_PARTS)
    graph, params = nnx.split(workload.model(), nnx.Param)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, layouts.annotate(params, layouts.gpt((axis,))))
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

        return Contender(name=name, step=once, state=(params, workload.OPTIMIZER.init(params)))


def names(options: Options) -> list[str]:
    """Those of our forms."""
    return [name for axis in options.axes for name in (axis, *([axis + IN_PARTS] if axis == "data" else []))]


def ours(options: Options) -> list[Contender]:
    """Our forms, each through all tokens, in turns."""
    found = [split(name) for name in names(options)]
    in_turns(found, options.tokens(), options.rounds)
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
