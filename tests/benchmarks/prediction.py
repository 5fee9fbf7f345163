"""Predicted collectives and peak memory of programs compared with what three compilers compile.

    python -m tests.benchmarks.prediction                                # all steps, meshes and styles: some 10 minutes
    python -m tests.benchmarks.prediction --steps gpt lstm --meshes 0 3  # some of them
    python -m tests.benchmarks.prediction --compiler v5p                 # or h100: ahead of time, no chip is needed
    python tests/benchmarks/prediction.py --corpus --compiler h100       # other people's programs, some of whose
                                                                         # packages bring a module `tests`
    python -m tests.benchmarks.prediction --json prediction.json
    python tests/benchmarks/prediction.py --corpus --compiler h100 --fit # store the error with the record
    python tests/benchmarks/prediction.py --corpus --compiler h100 --compiled FILE  # compiles nothing: minutes

Per program: collectives by kind (count and bytes), compiled and predicted by the ledger; and peak memory of one device,
argument + temp + output - alias bytes of `memory_analysis()`, and the predicted one. Without `--corpus`, programs are
the project's own train steps: models and variants, each on several meshes, with few and with many annotations. The
figures depend on the releases of JAX and of the compiler, not on the machine. `reshards` compares the same steps with
XLA's reshards.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

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

from benchmarks import command_line
from benchmarks.result_file import Result, Row, load, measured

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
NEWEST = (0, 12)
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
    json: Path | None = None
    """Output file of the figures."""
    compiled: Path | None = None
    """Output file of an earlier run with the same compiler, which may have been cut short: its programs are predicted
    anew, and not compiled. Holds as long as the library emits the same programs."""
    fit: bool = False
    """Store the error of the predicted peaks with the platform's record, for reports and `fits`."""


@dataclass(frozen=True)
class Case:
    """One program to compare."""

    name: str
    mesh: Sizes
    style: str
    make: Callable[[], Step]

    @property
    def label(self) -> str:
        """What the line of the program begins with."""
        return f"{self.name}; {sizes_text(dict(self.mesh))}" + f"; {self.style}" * bool(self.style)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The figures of one program; collectives are kind -> (count, bytes). None: not recorded."""

    name: str
    mesh: str
    style: str
    predicted: dict[str, tuple[int, int]]
    compiled: dict[str, tuple[int, int]]
    predicted_peak: int | None
    compiled_peak: int | None
    peak_ratio: float
    """Predicted over compiled peak."""
    compile_seconds: float | None

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


def result_of(benchmark: str, options: Any, compared: Sequence[Case]) -> Callable[[Sequence[Any]], Result]:
    """A function from rows to the result of a benchmark that compares programs for the compiler of its options."""
    name = None if options.compiler == "cpu" else options.compiler
    num_devices = max(math.prod(dict(case.mesh).values()) for case in compared)
    return partial(measured, benchmark, options, num_devices=num_devices, platform_name=name)


def first_line(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def devices_of(sizes: dict[str, int], compiler: CompilerName) -> Sequence[Any]:
    """The devices of a mesh, real or to compile for."""
    num_devices = math.prod(sizes.values())
    return jax.devices("cpu")[:num_devices] if compiler == "cpu" else cost.compile_only(DEVICES[compiler, num_devices])


def known_programs(options: Options) -> dict[tuple[str, str, str], Program]:
    """The programs of an earlier run, by name, mesh and style."""
    if options.compiled is None:
        return {}
    result = load(options.compiled)
    if result.jax != jax.__version__ or result.options["compiler"] != options.compiler:
        raise SystemExit(f"{options.compiled} is of JAX {result.jax} and {result.options['compiler']}")
    return {(p.name, p.mesh, p.style): p for p in programs_of(result)}


def program(case: Case, compiler: CompilerName, known: Program | None = None) -> Program:
    """The figures of a program with its first argument donated; those of the compiled one may be known."""
    sizes, platform = dict(case.mesh), PLATFORMS[compiler]
    with sharding.mesh(sizes, devices=devices_of(sizes, compiler)):
        with tracing_context():
            step = case.make()
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0)
        completion = jitted.complete(*step.args)
        predicted_peak = completion.memory(platform=platform).peak_bytes
        predicted = {str(k): v for k, v in completion.communication().lowered(platform).by_kind().items()}
        if known is not None and known.compiled_peak is not None:
            ratio = round(predicted_peak / known.compiled_peak, 4)
            found = replace(known, predicted=predicted, predicted_peak=predicted_peak, peak_ratio=ratio)
        else:
            started = time.perf_counter()
            compiled = jitted.lower(*step.args).compile()
            seconds = time.perf_counter() - started
            facts = cost.read_compiled(compiled)
            found = Program(
                name=case.name,
                mesh=sizes_text(sizes),
                style=case.style,
                predicted=predicted,
                compiled={str(k): v for k, v in facts.by_kind().items()},
                predicted_peak=predicted_peak,
                compiled_peak=facts.peak_bytes,
                peak_ratio=round(predicted_peak / facts.peak_bytes, 4),
                compile_seconds=round(seconds, 1),
            )
    jax.clear_caches()
    return found


def programs_of(result: Result) -> list[Program]:
    """The programs of a result that compiled."""
    rows = [row for row in result.rows if "error" not in row]
    names = ("predicted", "compiled")
    return [Program(**row | {name: {k: tuple(v) for k, v in row[name].items()} for name in names}) for row in rows]


def summary(result: Result) -> str:
    """How many programs agree, by criterion."""
    programs = programs_of(result)
    n, failed = len(programs), len(result.rows) - len(programs)
    names, meshes, styles = (len({getattr(p, name) for p in programs}) for name in ("name", "mesh", "style"))
    if result.options["corpus"]:
        what = f"{n} train and inference steps of other people"
    else:
        what = f"{n} train steps ({names} models and variants, {meshes} meshes, {styles} styles of annotations)"
    near = sum(abs(p.peak_ratio - 1) <= NEAR for p in programs)
    peaks = (
        f"peak memory within {NEAR:.0%} in {near}, within {error(programs, 0.5):.0%} in half, within "
        f"{error(programs, 0.9):.0%} in nine of ten"
    )
    if not result.options["corpus"] and result.options["compiler"] != "cpu":
        peaks = "peaks not compared: the programs take less than the compiler reserves"
    return (
        f"{what}{f', {failed} not compiled' * bool(failed)}: counts of collectives exact in "
        f"{sum(p.counts_agree for p in programs)}, bytes within {CLOSE:.0%} in {sum(p.bytes_agree for p in programs)}, "
        f"{peaks}"
    )


def stored_errors() -> str:
    """The errors of predicted peaks that reports state, of other people's programs on each platform."""
    return "; ".join(
        f"{platform}: within {known.median:.0%} in half and {known.large:.0%} in nine of ten of {known.num_programs}"
        for platform, known in PEAK_ERRORS.items()
    )


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


def table(result: Result) -> list[str]:
    """All figures as a Markdown table, then what failed or was mispredicted."""
    failed = [f"{row['name']}; {row['mesh']}; {row['style']}: {row['error']}" for row in result.rows if "error" in row]
    return [
        "| program | mesh | annotated | predicted | compiled | peak, predicted over compiled |",
        "|---|---|---|---|---|---|",
        *map(_row, programs_of(result)),
        *([""] if failed else []),
        *(f"- not compiled: {line}" for line in failed),
        *misses(result),
    ]


def misses(result: Result) -> list[str]:
    """Every misprediction of the own steps on XLA:CPU with its cause."""
    if result.options["corpus"] or result.platform != "cpu":
        return []
    found = ["", "Mispredictions and their causes:", ""]
    meshes = {sizes_text(dict(sizes)): number for number, sizes in enumerate(MESHES)}
    is_newest = tuple(map(int, result.jax.split(".")[:2])) >= NEWEST
    for p in programs_of(result):
        key = (p.name, meshes[p.mesh], p.style)
        collectives, peak = not (p.counts_agree and p.bytes_agree), abs(p.peak_ratio - 1) > NEAR
        cause = known_misses.PEAKS.get(key, (0, "unknown"))[1] if is_newest else OLDER
        texts = ["collectives"] * collectives + [f"peak, {p.peak_ratio:.2f}: {cause}"] * peak
        found += [f"- {p.name}; {p.mesh}; {p.style}: {'; '.join(texts)}"] if texts else []
    return found


def _row(p: Program) -> str:
    found = "the same" if p.predicted == p.compiled else _text(p.compiled)
    return f"| {p.name} | {p.mesh} | {p.style} | {_text(p.predicted)} | {found} | {p.peak_ratio:.2f} |"


def _text(found: dict[str, tuple[int, int]]) -> str:
    return "; ".join(f"{n} {kind} ({size:,})" for kind, (n, size) in sorted(found.items())) or "none"


def main(options: Options) -> None:
    """Prints a line per program, then the summary."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64 if options.corpus else 8)
    compared, known = list(cases(options)), known_programs(options)
    result = result_of("prediction", options, compared)
    found: list[Program] = []
    failed: list[Row] = []
    for case in compared:
        mesh = sizes_text(dict(case.mesh))
        try:
            p = program(case, options.compiler, known.get((case.name, mesh, case.style)))
        except Exception as error:  # of the package, the library or the compiler: the others go on
            text = first_line(error)
            failed.append({"name": case.name, "mesh": mesh, "style": case.style, "error": text})
            print(f"{case.label:60} failed: {text}", flush=True)
        else:
            found.append(p)
            agree = "as predicted" if p.counts_agree and p.bytes_agree else "mispredicted"
            times = f"compiled in {p.compile_seconds:.0f} s"
            print(f"{case.label:60} {agree:14} peak {p.peak_ratio:5.2f}  {times}", flush=True)
        if options.json is not None:
            result([*found, *failed]).save(options.json)  # hours of compiling: `--compiled` goes on from here
    final = result([*found, *failed])
    print(summary(final) if found else "no program", final.where, sep="\n")
    if options.fit and found:
        store(fitted(found), options.compiler)
        print(f"{fitted(found)} written to {PEAK_ERRORS_FILE}")


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
