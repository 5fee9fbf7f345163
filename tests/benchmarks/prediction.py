"""Predicted collectives and peak memory of programs compared with what three compilers compile.

    python -m tests.benchmarks.prediction                                # all steps, meshes and styles: some 20 minutes
    python -m tests.benchmarks.prediction --steps gpt lstm --meshes 0 3  # some of them
    python -m tests.benchmarks.prediction --compiler v5p                 # or h100: ahead of time, no chip is needed
    python tests/benchmarks/prediction.py --corpus --compiler h100       # other people's programs, some of whose
                                                                         # packages bring a module `tests`
    python -m tests.benchmarks.prediction --table prediction.md --json prediction.json
    python tests/benchmarks/prediction.py --corpus --compiler h100 --no-left --fit   # store the error with the record

Per program: collectives by kind (count and bytes), compiled and predicted by the ledger; peak memory of one device,
argument + temp + output - alias bytes of `memory_analysis()`, and the predicted one; and the bytes that a device sends
(`cost.wire_bytes`) relative to the same step with `engine="xla"`, where XLA's partitioner chooses the reshards. The
project's own steps run on XLA:CPU, both in alternation: the ratio of their median times is the last figure. All figures
except the last depend on the releases of JAX and of the compiler, not on the machine.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

import sharding
from sharding import cost
from sharding.explain.peak_error import PEAK_ERRORS, PEAK_ERRORS_FILE, PeakError
from sharding.hardware import Platform
from sharding.mesh import tracing_context
from sharding.spec import sizes_text

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` and `corpus` are top-level

import corpus
from support.train_steps import hand_written, known_misses, small_models
from support.train_steps.step import MESHES, STYLES, Sizes, Step

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

CompilerName = Literal["cpu", "v5p", "h100"]
PLATFORMS: dict[CompilerName, Platform] = {"cpu": "cpu", "v5p": "tpu", "h100": "gpu"}
DEVICES: dict[tuple[CompilerName, int], str] = {
    ("v5p", 8): "v5p:2x2x2",
    ("v5p", 64): "v5p:4x4x4",
    ("h100", 8): "h100:1x8",
    ("h100", 64): "h100:8x8",
}
"""Compiler and number of devices -> the devices to compile for."""


@dataclass(frozen=True)
class Options:
    """The programs to compare."""

    compiler: CompilerName = "cpu"
    """XLA:CPU, or a compiler ahead of time (extras `tpu` and `cuda13`)."""
    corpus: bool = False
    """Other people's programs (extra `corpus`) in place of the project's own steps."""
    steps: tuple[str, ...] = ()
    """Programs by name, or by the start of their names. Default: all."""
    meshes: tuple[int, ...] = ()
    """Indices of the meshes. Default: all."""
    styles: tuple[str, ...] = STYLES
    """Annotations of the own steps: the batch alone, or the weights too."""
    left: bool = True
    """Also compile each program with XLA's own reshards, to compare the bytes sent."""
    repeats: int = 7
    """Timed runs of each own step on XLA:CPU, with our reshards and with XLA's."""
    json: Path | None = None
    """Output file of the figures."""
    table: Path | None = None
    """Output file of a Markdown table."""
    fit: bool = False
    """Store the error of the predicted peaks with the platform's record, for reports and `fits`."""


@dataclass(frozen=True)
class Case:
    """One program to compare."""

    name: str
    mesh: Sizes
    style: str
    make: Callable[[], Step]


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
    left_bytes: int | None
    """Bytes that it sends with the reshards of XLA's partitioner, if compared."""
    time_ratio: float
    """Ratio of the median step time to that with the reshards of XLA's partitioner; 0 if not measured."""
    compile_seconds: float

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
    def sent_ratio(self) -> float | None:
        """Bytes sent, relative to XLA's reshards, if compared; 1 where neither sends any."""
        return None if self.left_bytes is None else (self.sent_bytes + 1) / (self.left_bytes + 1)


def cases(options: Options) -> Iterator[Case]:
    """The chosen programs, each on the chosen meshes."""
    if options.corpus:
        for adapter, modules in corpus.missing().items():
            print(f"{adapter}: not installed: {', '.join(modules)}", file=sys.stderr)
        programs = corpus.programs()
        for name in chosen(options.steps, programs):
            for sizes in at(options.meshes, corpus.MESHES):
                yield Case(name, sizes, "", partial(programs[name], sizes))
        return
    steps = STEPS | HALF
    for name in chosen(options.steps, steps):
        for sizes in at(options.meshes, MESHES):
            for style in options.styles:
                yield Case(name, sizes, style, partial(steps[name], style, sizes))


def chosen(asked: Sequence[str], names: Collection[str]) -> list[str]:
    """The names that are asked for, or start so; all if none is."""
    exact = set(asked) & set(names)
    return [n for n in names if not asked or n in exact or any(n.startswith(a) for a in set(asked) - exact)]


def at(indices: Sequence[int], meshes: Sequence[Sizes]) -> Sequence[Sizes]:
    """The meshes at some indices; all if none is given."""
    return [meshes[k] for k in indices] if indices else meshes


def program(case: Case, compiler: CompilerName, *, left: bool = True, repeats: int = 0) -> Program:
    """The figures of a program with its first argument donated."""
    sizes, platform = dict(case.mesh), PLATFORMS[compiler]
    num_devices = math.prod(sizes.values())
    is_cpu = compiler == "cpu"
    devices = jax.devices("cpu")[:num_devices] if is_cpu else cost.compile_only(DEVICES[compiler, num_devices])
    with sharding.mesh(sizes, devices=devices):
        with tracing_context():
            step = case.make()
        jitted = partial(sharding.jit, step.run, in_shardings=step.specs, donate_argnums=0)
        ours = jitted()
        completion = ours.complete(*step.args)
        started = time.perf_counter()
        compiled = ours.lower(*step.args).compile()
        seconds = time.perf_counter() - started
        by_xla = jitted(engine="xla").lower(*step.args).compile() if left else compiled
        facts = cost.read_compiled(compiled)
        found = Program(
            name=case.name,
            mesh=sizes_text(sizes),
            style=case.style,
            predicted={str(k): v for k, v in completion.communication().lowered(platform).by_kind().items()},
            compiled={str(k): v for k, v in facts.by_kind().items()},
            predicted_peak=completion.memory(platform=platform).peak_bytes,
            compiled_peak=facts.peak_bytes,
            sent_bytes=facts.sent_bytes,
            left_bytes=cost.read_compiled(by_xla).sent_bytes if left else None,
            time_ratio=ratio(compiled, by_xla, step.args, repeats),
            compile_seconds=round(seconds, 1),
        )
    jax.clear_caches()
    return found


def ratio(one: Any, other: Any, args: Sequence[Any], repeats: int) -> float:
    """The ratio of the median times of two compiled programs in `repeats` alternating runs."""
    if not repeats:
        return 0.0
    seconds: tuple[list[float], list[float]] = ([], [])
    for k in range(repeats + 1):
        for found, compiled in zip(seconds, (one, other), strict=True):
            given = jax.block_until_ready(jax.tree.map(zeros, tuple(args), compiled.input_shardings[0]))
            start = time.perf_counter()
            jax.block_until_ready(compiled(*given))
            if k:  # the first run is warm-up
                found.append(time.perf_counter() - start)
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def zeros(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
    """An array of zeros; PRNG keys all of one seed."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.device_put(jnp.broadcast_to(jax.random.key(0), shape.shape), sharding)
    return jax.device_put(jnp.zeros(shape.shape, shape.dtype), sharding)


def summary(programs: Sequence[Program]) -> list[str]:
    """How many programs agree, by criterion."""
    n, sent = len(programs), sorted(p.sent_ratio for p in programs if p.sent_ratio is not None)
    lines = [
        f"{sum(p.counts_agree for p in programs)} of {n}: kinds and counts of collectives as predicted",
        f"{sum(p.bytes_agree for p in programs)} of {n}: bytes of each kind within {CLOSE:.0%}",
        f"{sum(abs(p.peak_ratio - 1) <= NEAR for p in programs)} of {n}: peak memory within {NEAR:.0%}; within "
        f"{error(programs, 0.5):.0%} in half of the programs, within {error(programs, 0.9):.0%} in nine of ten",
    ]
    if sent:
        lines.append(
            f"{sum(ratio <= 1 for ratio in sent)} of {n}: no more bytes sent than with XLA's reshards; ratio "
            f"{sent[-1]:.2f} at worst, median {statistics.median(sent):.2f}, best {sent[0]:.2f}"
        )
    if any(p.time_ratio for p in programs):
        median = statistics.median(p.time_ratio for p in programs)
        lines.append(f"median step-time ratio to XLA's reshards: {median:.2f}")
    return lines


def error(programs: Sequence[Program], share: float) -> float:
    """The relative error of the peak that this share of the programs stays within, as stored in `PeakError`."""
    errors = sorted(abs(p.peak_ratio - 1) for p in programs)
    return errors[max(0, math.ceil(share * len(errors)) - 1)]


def fitted(programs: Sequence[Program]) -> PeakError:
    """The error of the predicted peaks, as a platform's record has it."""
    ratios = sorted(1 / p.peak_ratio for p in programs)
    low, high = (ratios[max(0, math.ceil(share * len(ratios)) - 1)] for share in (0.05, 0.95))
    figures = {"median": error(programs, 0.5), "large": error(programs, 0.9), "low": low, "high": high}
    return PeakError(num_programs=len(programs), **{name: round(value, 2) for name, value in figures.items()})


def store(found: PeakError, compiler: CompilerName) -> None:
    """Writes the error of a platform into the package's data file."""
    stored = {platform: asdict(known) for platform, known in PEAK_ERRORS.items()}
    text = json.dumps(stored | {PLATFORMS[compiler]: asdict(found)}, indent=2)
    PEAK_ERRORS_FILE.write_text(text + "\n")


def table(programs: Sequence[Program], failed: Sequence[str], options: Options) -> str:
    """All figures as a Markdown table."""
    compiled_for = "eight virtual CPU devices" if options.compiler == "cpu" else f"{options.compiler} ahead of time"
    arguments = " --corpus" * options.corpus + f" --compiler {options.compiler}" * (options.compiler != "cpu")
    arguments += " --no-left" * (not options.left)
    script = "tests/benchmarks/prediction.py" if options.corpus else "-m tests.benchmarks.prediction"
    head = [
        "# Predicted and compiled",
        "",
        f"JAX {jax.__version__}, {compiled_for}; `python {script}{arguments}` writes this.",
        "Peak is predicted over compiled; sent (bytes) and time are relative to the reshards of XLA's partitioner.",
        "",
        *(f"- {line}" for line in summary(programs)),
        "",
        "| program | mesh | annotated | predicted | compiled | peak | sent | time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ends = ["", *(f"- not compiled: {line}" for line in failed), *misses(programs, options)]
    return "\n".join([*head, *map(_row, programs), *ends]) + "\n"


def misses(programs: Sequence[Program], options: Options) -> list[str]:
    """Every misprediction of the own steps on XLA:CPU with its cause."""
    if options.corpus or options.compiler != "cpu":
        return []
    found = ["Mispredictions and their causes:", ""]
    meshes = {sizes_text(dict(sizes)): number for number, sizes in enumerate(MESHES)}
    for p in programs:
        key = (p.name, meshes[p.mesh], p.style)
        collectives, peak = not (p.counts_agree and p.bytes_agree), abs(p.peak_ratio - 1) > NEAR
        cause = known_misses.PEAKS.get(key, (0, "unknown"))[1] if IS_NEWEST else OLDER
        what = [
            text
            for text, is_missed in (
                ("collectives", collectives),
                (f"peak, {p.peak_ratio:.2f}: {cause}", peak),
                (f"sent, {_ratio(p.sent_ratio)}", (p.sent_ratio or 0) > 1),
            )
            if is_missed
        ]
        found += [f"- {p.name}; {p.mesh}; {p.style}: {'; '.join(what)}"] if what else []
    return found


def _row(p: Program) -> str:
    found = "the same" if p.predicted == p.compiled else _text(p.compiled)
    ratios = " | ".join(map(_ratio, (p.peak_ratio, p.sent_ratio, p.time_ratio)))
    return f"| {p.name} | {p.mesh} | {p.style} | {_text(p.predicted)} | {found} | {ratios} |"


def _ratio(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else "-"


def _text(found: dict[str, tuple[int, int]]) -> str:
    return "; ".join(f"{n} {kind} ({size:,})" for kind, (n, size) in sorted(found.items())) or "none"


def main(options: Options) -> None:
    """Prints a line per program, then the summary."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64 if options.corpus else 8)
    found: list[Program] = []
    failed: list[str] = []
    repeats = options.repeats if options.left and options.compiler == "cpu" and not options.corpus else 0
    for case in cases(options):
        label = f"{case.name}; {sizes_text(dict(case.mesh))}" + f"; {case.style}" * bool(case.style)
        try:
            p = program(case, options.compiler, left=options.left, repeats=repeats)
        except Exception as error:  # of the package, the library or the compiler: the others go on
            failed.append(f"{label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            print(f"{label:60} failed: {failed[-1]}", flush=True)
            continue
        found.append(p)
        agree = "as predicted" if p.counts_agree and p.bytes_agree else "mispredicted"
        times = f"time {p.time_ratio:5.2f}" if repeats else f"compiled in {p.compile_seconds:.0f} s"
        print(f"{label:60} {agree:14} peak {p.peak_ratio:5.2f}  sent {_ratio(p.sent_ratio):>5}  {times}", flush=True)
    print("\n".join(summary(found) if found else ["no program"]))
    if options.fit and found:
        store(fitted(found), options.compiler)
        print(f"{fitted(found)} written to {PEAK_ERRORS_FILE}")
    if options.table is not None:
        options.table.write_text(table(found, failed, options))
    if options.json is not None:
        document = {"jax": jax.__version__, "compiler": options.compiler, "summary": summary(found), "failed": failed}
        options.json.write_text(json.dumps({**document, "programs": [asdict(p) for p in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
