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
from flax import nnx

import sharding
from sharding import tensor
from sharding.models import gpt, layouts

from . import command_line, gpt_workload
from .contenders import (
    DEVICES,
    Contender,
    Rounds,
    Times,
    alternate,
    ratio_row,
    seconds,
    start,
    updated,
    value_and_grad,
)
from .ratios import Ratio, unknown
from .result_file import Result, Row, measured

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


def ratio_rows(options: Options, found: dict[str, Times]) -> list[Row]:
    """Each axis over one device, ours and PyTorch's, and ours over PyTorch's."""

    def best(name: str) -> Times | None:
        both = [found[each] for each in (name, f"{name}, compiled") if each in found]
        return min(both, key=lambda times: times.median, default=None)

    rows = []
    for name in names(options):
        mine, peer, alone = found[f"ours, {name}"], best(f"PyTorch, {name}"), best("PyTorch, single")
        rows.append(ratio_row(f"{name}: ours over one device", mine, found["ours, single"]))
        if name.endswith(IN_PARTS):
            in_parts = found[f"ours, single{IN_PARTS}"]
            rows.append(ratio_row(f"{name}: ours over one device, too", mine, in_parts))
        if peer is not None and alone is not None:
            rows.append(ratio_row(f"{name}: PyTorch over one device", peer, alone))
            rows.append(ratio_row(f"{name}: ours over PyTorch", mine, peer))
    return rows


def summary(result: Result) -> str:
    """Of each axis: its step over one device's, PyTorch's over its own, and ours over PyTorch's."""
    ratios = {row["name"]: Ratio.of_row(row) for row in result.of_kind("ratio")}
    texts = {
        "ours over one device": "{} of one device's step",
        "ours over one device, too": "{} where both do",
        "PyTorch over one device": "PyTorch {} of its own",
        "ours over PyTorch": "{} of PyTorch's",
    }
    found: dict[str, list[str]] = {}
    for name, ratio in ratios.items():
        axis, _, what = name.partition(": ")
        found.setdefault(axis, []).append(texts[what].format(ratio))
    return "; ".join(f"{axis}: {', '.join(parts)}" for axis, parts in found.items()) + unknown(ratios.values())


def main(options: Options) -> None:
    """Measures, prints and writes the figures."""
    start()
    found = seconds(options, lambda: ours(options), "torch_axes.py", parts=(1, PARTS))
    rows = [*(times.as_row() for times in found.values()), *ratio_rows(options, found)]
    result = measured("axes", options, rows, num_devices=DEVICES)
    print("\n".join(map(str, rows)), summary(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
