"""Rank correlation of estimated and measured step times over many shardings of one train step.

    python -m tests.benchmarks.ranking                                          # an idle machine: some 10 minutes
    python -m tests.benchmarks.ranking --repeats 2 --quick                      # a quick look
    python -m tests.benchmarks.ranking --json ranking.json

The step of a small GPT (AdamW, gradient clipping) on eight virtual CPU devices is annotated in many ways, from standard
to bad. For each, `completion.estimate` predicts the step time from rates that `cost.calibrate` measured in the same
process; then the step is compiled and its median time measured. Spearman's rank correlation compares the two orders: of
all variants, and of the ten estimated fastest, among which a planner has to choose. The regret is how much longer the
one estimated fastest takes than the fastest of all. Beside it, the time by `jax.experimental.roofline`, which sees the
unpartitioned program and so gives each of its layouts the same. All variants alternate, so that a slowdown of the
machine affects all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import scipy.stats
from jax.experimental import roofline

import sharding
from sharding import P, cost
from sharding.hardware import Chip
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.train_step import train_functions
from sharding.models import gpt, layouts
from sharding.models.layouts import Layout, Rule, U, rule
from sharding.spec import sizes_text

from . import command_line
from .result_file import Result, measured


@dataclass(frozen=True)
class Options:
    """The model, the number of runs and the output file."""

    batch: int = 32
    context: int = 64
    features: int = 128
    layers: int = 2
    repeats: int = 7
    """Measured steps of each variant, after one warm-up step."""
    quick: bool = False
    """Calibrate in seconds."""
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One sharding of the step."""

    sizes: Mapping[str, int]
    batch: P | None
    layout: Layout = sharding.layout({})


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one variant."""

    name: str
    mesh: str
    estimated_seconds: float
    measured_seconds: float
    roofline_seconds: float
    """By JAX's roofline of the whole program, over the number of devices."""


BEST = 10
"""Of the variants estimated fastest, how many a planner would compare further."""

TWO, ROWS = {"data": 2, "tensor": 4}, P("data")
MEGATRON = layouts.gpt(["tensor"])


def only(*patterns: str) -> Layout:
    """Megatron's rules for some of the parameters."""
    return sharding.layout(rule for rule in MEGATRON.rules if any(part in rule.pattern for part in patterns))


def layout_of(*rules: Rule) -> Layout:
    return sharding.layout(rules)


VARIANTS: dict[str, Variant] = {
    "batch over all devices": Variant(sizes={"data": 8}, batch=ROWS),
    "batch over four devices": Variant(sizes={"data": 4, "tensor": 2}, batch=ROWS),
    "batch over two devices": Variant(sizes=TWO, batch=ROWS),
    "replicated": Variant(sizes=TWO, batch=None),
    "Megatron": Variant(sizes=TWO, batch=ROWS, layout=MEGATRON),
    "Megatron, tensor=2": Variant(sizes={"data": 4, "tensor": 2}, batch=ROWS, layout=MEGATRON),
    "Megatron, tensor=8": Variant(sizes={"tensor": 8}, batch=None, layout=MEGATRON),
    "FSDP": Variant(sizes={"fsdp": 8}, batch=P("fsdp"), layout=layouts.gpt(["fsdp"])),
    "FSDP and tensor": Variant(sizes={"fsdp": 2, "tensor": 4}, batch=P("fsdp"), layout=layouts.gpt(["fsdp", "tensor"])),
    "only attention": Variant(sizes=TWO, batch=ROWS, layout=only("attention")),
    "only the MLPs": Variant(sizes=TWO, batch=ROWS, layout=only("mlp")),
    "only the table, by rows": Variant(sizes=TWO, batch=ROWS, layout=only("table")),
    "only the table, by columns": Variant(sizes=TWO, batch=ROWS, layout=layout_of(rule("*/table", P(U, "tensor")))),
    "residual stream over features": Variant(sizes=TWO, batch=ROWS, layout=layout_of(rule("*/scale", P("tensor")))),
    "contracted dims of the MLPs": Variant(
        sizes=TWO,
        batch=ROWS,
        layout=layout_of(rule("*/mlp/w1", P("tensor", None)), rule("*/mlp/w2", P(None, "tensor"))),
    ),
    "head features": Variant(
        sizes=TWO, batch=ROWS, layout=layout_of(rule("*/attention/qkv", P(None, None, None, "tensor")))
    ),
    "Megatron, batch over all": Variant(sizes=TWO, batch=P(("data", "tensor")), layout=MEGATRON),
}


def functions(options: Options, layout: Layout) -> tuple[Any, Any]:
    """The initialisation and the train step."""
    config = gpt.Config(
        vocab=256,
        context=options.context,
        layers=options.layers,
        features=options.features,
        heads=8,
        kv_heads=8,
        mlp_features=4 * options.features,
    )
    init, train_step, *_ = train_functions(
        lambda rngs: gpt.GPT(config, rngs=rngs),
        gpt.next_token_loss,
        layout=lambda axes: layout,
        optimization=Optimization(),
        steps=1000,
    )
    return init, train_step


class Case:
    """One variant, completed and compiled."""

    def __init__(self, variant: Variant, options: Options, chip: Chip):
        init, train_step = functions(options, variant.layout)
        self.over = sharding.mesh(variant.sizes)
        tokens = np.random.default_rng(0).integers(0, 256, (options.batch, options.context + 1)).astype(np.int32)
        with self.over:
            specs = (None, variant.batch)
            self.step = sharding.jit(train_step, in_shardings=specs, donate_argnums=(0,))
            shapes = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)
            completion = self.step.complete(*shapes)
            self.estimate = completion.estimate(chip)
            state, self.tokens = completion.in_shardings
            self.state = jax.block_until_ready(sharding.jit(init, out_shardings=state)(jax.random.key(0)))
            self.tokens = sharding.put(tokens, self.tokens)

    def seconds(self) -> float:
        """The time of one more step."""
        with self.over:
            begun = time.perf_counter()
            self.state, loss = self.step(self.state, self.tokens)
            jax.block_until_ready((self.state, loss))
            return time.perf_counter() - begun


def roofline_seconds(options: Options, chip: Chip, *, num_devices: int) -> float:
    """The time by JAX's roofline: the longer of compute and memory access of the program, shared by the devices."""
    init, train_step = functions(options, ())
    tokens = jax.ShapeDtypeStruct((options.batch, options.context + 1), np.int32)
    found = roofline.roofline(train_step)(jax.eval_shape(init, jax.random.key(0)), tokens)[1]
    compute_seconds = found.flops / chip.rates.float32_flops_per_second
    return max(compute_seconds, found.hbm_bytes / chip.memory_bytes_per_second) / num_devices


def measured_rows(options: Options) -> list[Row]:
    """The figures of all variants, fastest first."""
    effort = cost.QUICK if options.quick else None
    with sharding.mesh(TWO) as mesh:
        chip = cost.calibrate(mesh, effort=effort, say=lambda line: print(line, flush=True)).chip
    by_roofline = roofline_seconds(options, chip, num_devices=8)
    cases = {}
    for name, variant in VARIANTS.items():
        cases[name] = Case(variant, options, chip)
        first = cases[name].seconds()
        print(f"{name:32} compiled in {first:6.1f} s, estimated {cases[name].estimate.seconds:7.4f} s", flush=True)
    for case in cases.values():
        case.seconds()
    found = {name: [] for name in cases}
    for _ in range(options.repeats):
        for name, case in cases.items():
            found[name].append(case.seconds())
    rows = [
        Row(
            name=name,
            mesh=sizes_text(VARIANTS[name].sizes),
            estimated_seconds=case.estimate.seconds,
            measured_seconds=statistics.median(found[name]),
            roofline_seconds=by_roofline,
        )
        for name, case in cases.items()
    ]
    return sorted(rows, key=lambda row: row.measured_seconds)


def best(rows: Sequence[Row]) -> list[Row]:
    """The variants that are estimated fastest, in that order."""
    return sorted(rows, key=lambda row: row.estimated_seconds)[:BEST]


def spearman(rows: Sequence[Row]) -> float:
    """Spearman's rank correlation of estimated and measured step times."""
    pairs: Any = scipy.stats.spearmanr([r.estimated_seconds for r in rows], [r.measured_seconds for r in rows])
    return float(pairs.statistic)


def regret(rows: Sequence[Row]) -> float:
    """How much longer the variant that is estimated fastest takes than the fastest of all, as a share of its time."""
    return best(rows)[0].measured_seconds / min(row.measured_seconds for row in rows) - 1


def rows_of(result: Result) -> list[Row]:
    """The rows of a result file."""
    return [Row(**row) for row in result.rows]


def summary(result: Result) -> str:
    """The two correlations and the regret."""
    rows = rows_of(result)
    return (
        f"Spearman's correlation {spearman(rows):.2f} of {len(rows)} layouts, {spearman(best(rows)):.2f} of the {BEST} "
        f"estimated fastest; the first takes {regret(rows):.0%} longer than the fastest"
    )


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    rows = rows_of(result)
    order = {r.name: k for k, r in enumerate(sorted(rows, key=lambda row: row.estimated_seconds), 1)}
    return [
        "| annotated | mesh | measured, ms | estimated, ms | JAX's roofline, ms | measured rank | estimated rank |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r.name} | {r.mesh} | {1e3 * r.measured_seconds:.1f} | {1e3 * r.estimated_seconds:.1f} | "
            f"{1e3 * r.roofline_seconds:.1f} | {k} | {order[r.name]} |"
            for k, r in enumerate(rows, 1)
        ),
    ]


def main(options: Options) -> None:
    """Measures, prints the table and writes the output file."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    result = measured("ranking", options, measured_rows(options))
    print(*table(result), summary(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
