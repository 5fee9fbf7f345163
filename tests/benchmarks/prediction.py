"""Predicted collectives and peak memory of train steps compared with what XLA:CPU compiles.

    python -m tests.benchmarks.prediction                                # all steps, meshes and styles: some 20 minutes
    python -m tests.benchmarks.prediction --steps gpt lstm --meshes 0 3  # some of them
    python -m tests.benchmarks.prediction --table prediction.md --json prediction.json

Per program: collectives by kind (count and bytes), compiled and predicted by the ledger; peak memory of one device,
argument + temp + output - alias bytes of `memory_analysis()`, and the predicted one; and the bytes that a device sends
(`cost.wire_bytes`) relative to the same step with `engine="xla"`, where XLA's partitioner chooses the reshards. Both
run in alternation, and the ratio of their median step times is the last figure. On eight virtual CPU devices; all
figures except the last depend on the release of JAX, not on the machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import sharding
from sharding import cost
from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` is top-level

from support.train_steps import hand_written, known_misses, small_models
from support.train_steps.step import MESHES, STYLES

STEPS = small_models.STEPS | hand_written.STEPS
HALF = {
    f"{name}, 16 bits": small_models.gpt_step(dtype="bfloat16", **options)
    for name, options in {
        "gpt": {},
        "gpt, scanned": {"scan": True},
        "gpt, scanned, remat": {"scan": True, "remat": True},
    }.items()
}
CLOSE = 0.05
"""Relative tolerance of the bytes of a kind."""
NEAR = 0.10
"""Relative tolerance of the peak."""
IS_NEWEST = jax.__version_info__ >= (0, 12)
OLDER = "XLA of JAX 0.10.2 partitions, schedules and fuses differently, and undoes remat"


@dataclass(frozen=True)
class Options:
    """The programs to compare."""

    steps: tuple[str, ...] = tuple(STEPS | HALF)
    """Train steps by name."""
    meshes: tuple[int, ...] = tuple(range(len(MESHES)))
    """Indices of the meshes."""
    styles: tuple[str, ...] = STYLES
    """Annotations: the batch alone, or the weights too."""
    repeats: int = 7
    """Timed runs of each program, with our reshards and with XLA's."""
    json: Path | None = None
    """Output file of the figures."""
    table: Path | None = None
    """Output file of a Markdown table."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """The figures of one program; collectives are kind -> (count, bytes)."""

    name: str
    mesh: str
    style: str
    predicted: dict[str, tuple[int, int]]
    compiled: dict[str, tuple[int, int]]
    predicted_peak: int
    compiled_peak: int
    sent_bytes: int
    """Bytes that a device sends in all compiled collectives."""
    left_bytes: int
    """Bytes that it sends with the reshards of XLA's partitioner."""
    time_ratio: float
    """Ratio of the median step time to that with the reshards of XLA's partitioner; 0 if not measured."""

    @property
    def counts_agree(self) -> bool:
        """Whether the count of each kind is equal."""
        return {k: n for k, (n, _) in self.predicted.items()} == {k: n for k, (n, _) in self.compiled.items()}

    @property
    def bytes_agree(self) -> bool:
        """Whether the bytes of each kind are within `CLOSE`."""
        kinds = self.predicted.keys() | self.compiled.keys()
        pairs = [(self.predicted.get(k, (0, 0))[1], self.compiled.get(k, (0, 0))[1]) for k in kinds]
        return all(abs(a - b) <= CLOSE * b for a, b in pairs)

    @property
    def peak_ratio(self) -> float:
        """Predicted over compiled peak."""
        return self.predicted_peak / self.compiled_peak

    @property
    def sent_ratio(self) -> float:
        """Bytes sent, relative to XLA's reshards."""
        return self.sent_bytes / max(1, self.left_bytes)


def program(name: str, style: str, sizes: dict[str, int], repeats: int) -> Program:
    """The figures of a train step with donated state on one mesh."""
    step = (STEPS | HALF)[name](style, sizes)

    def jitted(engine: str) -> Any:
        return sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0, engine=engine)

    with sharding.mesh(sizes):
        ours = jitted("sharding")
        completion = ours.complete(*step.args)
        compiled, by_xla = ours.lower(*step.args).compile(), jitted("xla").lower(*step.args).compile()
        facts, xla_facts = cost.read_compiled(compiled), cost.read_compiled(by_xla)
        found = Program(
            name=name,
            mesh=sizes_text(sizes),
            style=style,
            predicted={str(k): v for k, v in completion.communication().lowered("cpu").by_kind().items()},
            compiled={str(k): v for k, v in facts.by_kind().items()},
            predicted_peak=completion.memory().peak_bytes,
            compiled_peak=facts.peak_bytes,
            sent_bytes=facts.sent_bytes,
            left_bytes=xla_facts.sent_bytes,
            time_ratio=ratio(compiled, by_xla, step.args, repeats),
        )
    jax.clear_caches()
    return found


def ratio(one: Any, other: Any, args: Sequence[Any], repeats: int) -> float:
    """The ratio of the median times of two compiled programs in `repeats` alternating runs."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats + 1):
        for found, compiled in zip(seconds, (one, other), strict=True):
            given = jax.block_until_ready(jax.tree.map(zeros, tuple(args), compiled.input_shardings[0]))
            start = time.perf_counter()
            jax.block_until_ready(compiled(*given))
            if k:  # the first run is warm-up
                found.append(time.perf_counter() - start)
    return statistics.median(seconds[0]) / statistics.median(seconds[1]) if repeats else 0.0


def zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """An array of zeros; PRNG keys all of one seed."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0), shape.shape), sharding)
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), sharding)


def summary(programs: Sequence[Program]) -> list[str]:
    """How many programs agree, by criterion."""
    n, sent = len(programs), sorted(p.sent_ratio for p in programs)
    return [
        f"{sum(p.counts_agree for p in programs)} of {n}: kinds and counts of collectives as predicted",
        f"{sum(p.bytes_agree for p in programs)} of {n}: bytes of each kind within {CLOSE:.0%}",
        f"{sum(abs(p.peak_ratio - 1) <= NEAR for p in programs)} of {n}: peak memory within {NEAR:.0%}",
        f"{sum(ratio <= 1 for ratio in sent)} of {n}: no more bytes sent than with XLA's reshards; ratio "
        f"{sent[-1]:.2f} at worst, median {statistics.median(sent):.2f}, best {sent[0]:.2f}",
        f"median step-time ratio to XLA's reshards: {statistics.median(p.time_ratio for p in programs):.2f}",
    ]


def table(programs: Sequence[Program]) -> str:
    """All figures as a Markdown table."""
    head = [
        "# Predicted and compiled",
        "",
        f"JAX {jax.__version__}, eight virtual CPU devices; `python -m tests.benchmarks.prediction` writes this.",
        "Peak is predicted over compiled; sent (bytes) and time are relative to the reshards of XLA's partitioner.",
        "",
        *(f"- {line}" for line in summary(programs)),
        "",
        "| program | mesh | annotated | predicted | compiled | peak | sent | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(_row, programs), "", *misses(programs)]) + "\n"


def misses(programs: Sequence[Program]) -> list[str]:
    """Every misprediction with its cause."""
    found = ["Mispredictions and their causes:", ""]
    meshes = {sizes_text(dict(sizes)): number for number, sizes in enumerate(MESHES)}
    for p in programs:
        key = (p.name, meshes[p.mesh], p.style)
        collectives, peak = not (p.counts_agree and p.bytes_agree), abs(p.peak_ratio - 1) > NEAR
        what = [
            f"{name}: {table.get(key, (0, 'unknown'))[1] if IS_NEWEST else OLDER}"
            for name, is_missed, table in (
                ("collectives", collectives, known_misses.COLLECTIVES),
                (f"peak, {p.peak_ratio:.2f}", peak, known_misses.PEAKS),
                (f"sent, {p.sent_ratio:.2f}", p.sent_ratio > 1, known_misses.COLLECTIVES),
            )
            if is_missed
        ]
        found += [f"- {p.name}; {p.mesh}; {p.style}: {'; '.join(what)}"] if what else []
    return found


def _row(p: Program) -> str:
    found = "the same" if p.predicted == p.compiled else _text(p.compiled)
    ratios = " | ".join(f"{ratio:.2f}" for ratio in (p.peak_ratio, p.sent_ratio, p.time_ratio))
    return f"| {p.name} | {p.mesh} | {p.style} | {_text(p.predicted)} | {found} | {ratios} |"


def _text(found: dict[str, tuple[int, int]]) -> str:
    return "; ".join(f"{n} {kind} ({size:,})" for kind, (n, size) in found.items()) or "none"


def main(options: Options) -> None:
    """Prints a line per program, then the summary."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    found: list[Program] = []
    for name in options.steps:
        for number in options.meshes:
            for style in options.styles:
                p = program(name, style, dict(MESHES[number]), options.repeats)
                found.append(p)
                agree = "as predicted" if p.predicted == p.compiled else "mispredicted"
                label = f"{p.name}; {p.mesh}; {p.style}"
                ratios = f"peak {p.peak_ratio:5.2f}  sent {p.sent_ratio:5.2f}  time {p.time_ratio:5.2f}"
                print(f"{label:60} {agree:14} {ratios}", flush=True)
    print("\n".join(summary(found)))
    if options.table is not None:
        options.table.write_text(table(found))
    if options.json is not None:
        document = {"jax": jax.__version__, "summary": summary(found), "programs": [asdict(p) for p in found]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
