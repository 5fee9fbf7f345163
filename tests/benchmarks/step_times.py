"""Estimated and measured step times of whole programs on one device, and predicted and measured peak memory.

    python tests/benchmarks/step_times.py                      # on a GPU or TPU: some 5 minutes
    python tests/benchmarks/step_times.py --programs bert      # some of them, by name or the start of names
    python tests/benchmarks/step_times.py --smoke              # on a CPU: small steps, whose times mean little
    python tests/benchmarks/step_times.py --measured FILE      # anywhere: estimates and predicts anew what was measured

Programs are train steps of the project's models at their published sizes, and those of other people whose packages are
installed (extra `corpus`), with random parameters and batches. Each is a process of its own: several compile side by
side into a cache, then each runs alone. The step time is estimated twice: by the chip's record, and by its rates as
`sharding calibrate` measures them. The peak is that of the allocator; it is null where loading the program took more.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from sharding import cost, hardware
from sharding.launch.sharded_sequences import next_tokens
from sharding.launch.workloads import gpt_moe_text
from sharding.mesh import tracing_context
from sharding.models import bert, dlrm, gpt, gpt_moe, image_classifier, layouts, resnet, vit

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `support` and `corpus` are top-level

import corpus
from support.train_steps import small_models
from support.train_steps.small_models import floats, ints
from support.train_steps.step import MakeStep, Sizes, Step

from benchmarks import command_line
from benchmarks.prediction import chosen
from benchmarks.ratios import rounded
from benchmarks.result_file import FOLDER, Result, Row, device_name, file_name, load, measured

MESH: Sizes = {"data": 1, "expert": 1, "model": 1}
PEOPLES = (
    "e3nn-jax: potential",
    "equinox: decoder, data",
    "equinox: decoder, megatron",
    "equinox: lstm",
    "equinox: mlp",
    "equinox: resnet50",
    "equinox: unet",
    "flax: linen decoder",
    "flax: linen decoder, scanned, remat",
    "flax: linen lstm",
    "flax: nnx decoder, cached",
    "flax: nnx decoder, float32, dropout, data",
    "flax: nnx decoder, scanned, fsdp",
    "dm-haiku: resnet50",
    "dm-haiku: transformer, data",
    "linax: s5",
    "numpyro: vae",
    "optax: contrastive",
    "optax: lion",
    "optax: muon",
)
"""Programs of the corpus that fit on one device and whose loops have a known length."""
POSITIVE = frozenset("nu v v_col v_row".split())
"""Names of optimizer state whose root is taken."""
WARM = 3
"""Steps before the timed ones."""
COMPILATION = 0.65
"""Of the minutes, after which no program is waited for that is not compiled."""
AHEAD = 6
"""Programs that load while another runs."""
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
"""Environment of processes that cache all that they compile."""
LEAST_SECONDS, TURNS, MOST_CALLS = 0.2, 5, 30
"""Of a timed turn; how many turns; calls of one at most."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The programs, and where figures go."""

    programs: tuple[str, ...] = ()
    """By name, or by the start of their names. Default: all."""
    smoke: bool = False
    """The small train steps of the tests, to see that the command works."""
    minutes: float = 8.0
    """After as many minutes no further program runs."""
    side_by_side: int = 0
    """How many compile at once; by default half as many as there are cores."""
    profile: Path | None = None
    """Folder for a trace of one step of each program and its compiled module."""
    alone: str = ""
    """Compiles one program in this process; with a calibration, also runs it, and prints its figures as JSON."""
    calibration: Path | None = None
    """The rates of the device, for a program that runs alone."""
    measured: Path | None = None
    """Output file of an earlier run, whose programs are estimated anew; the file is rewritten."""
    json: Path | None = None
    """Output file of the figures; by default one of `results/`, by the device's name."""


def own_programs() -> dict[str, Callable[[Sizes], Step]]:
    """The project's models at published sizes, with AdamW and clipping."""

    def gpt_of(rows: int, **options: Any) -> Any:
        config = replace(gpt.PRESETS["gpt-small"], **options)
        tokens = ints(rows, config.context + 1)
        return small_models.step(lambda rngs: gpt.GPT(config, rngs=rngs), gpt.next_token_loss, layouts.gpt, tokens)

    def experts(rows: int) -> Any:
        config = replace(gpt_moe.PRESETS["gpt-moe-2b"], num_experts=8)
        tokens = ints(rows, config.context + 1)
        make = lambda rngs: gpt_moe.GPTMoE(config, rngs=rngs)  # noqa: E731
        loss = lambda model, tokens, key: gpt_moe_text.loss(model, *next_tokens(tokens), key)  # noqa: E731
        return small_models.step(make, loss, layouts.gpt_moe, tokens)

    def images(module: Any, config: Any, layout: Any, rows: int, **options: Any) -> Any:
        batch = image_classifier.Labelled(floats(rows, config.image, config.image, config.channels), ints(rows))
        loss = lambda model, batch, key: image_classifier.loss(model(batch.images, **options), batch.labels)  # noqa: E731
        return small_models.step(lambda rngs: module(config, rngs=rngs), loss, layout, batch)

    masked = replace(bert.PRESETS["bert-base"], dropout=0.0)
    sentences = bert.Masked(ints(32, 512), ints(32, 77), ints(32, 77))
    clicks = replace(dlrm.PRESETS["dlrm-large"], tables=(2_000_000,) * 4 + (10_000,) * 22)
    made = {
        "gpt-small": gpt_of(16),
        "gpt-small, plain JAX": gpt_of(16, kernels="xla"),
        "gpt-small, float32, plain JAX": gpt_of(8, kernels="xla", dtype="float32"),
        "gpt-small, scanned, remat": gpt_of(32, scan=True, remat=True),
        "gpt of 24 x 2,048": gpt_of(4, layers=24, features=2048, heads=16, kv_heads=16, mlp_features=8192, scan=True),
        "gpt-moe of 8 experts": experts(8),
        "bert-base": small_models.step(
            lambda rngs: bert.BERT(masked, rngs=rngs), bert.masked_loss, layouts.bert, sentences
        ),
        "resnet-50": images(resnet.ResNet, resnet.PRESETS["resnet-50"], layouts.resnet, 128, training=True),
        "vit-b16": images(vit.ViT, vit.PRESETS["vit-b16"], layouts.vit, 64),
        "dlrm": small_models.step(
            lambda rngs: dlrm.DLRM(clicks, rngs=rngs),
            lambda model, batch, key: dlrm.loss(model, batch),
            layouts.dlrm,
            dlrm.Clicks(floats(16_384, 13), ints(16_384, 26), floats(16_384)),
        ),
    }
    return of_batches(made)


def of_batches(made: Mapping[str, MakeStep]) -> dict[str, Callable[[Sizes], Step]]:
    """Steps with only the batch annotated, by name."""
    return {name: partial(make, "batch") for name, make in made.items()}


def programs(options: Options) -> dict[str, Callable[[Sizes], Step]]:
    """Name -> program, of those that are chosen and whose packages are installed."""
    found = of_batches(small_models.STEPS) if options.smoke else own_programs() | peoples()
    return {name: found[name] for name in chosen(options.programs, found)}


def peoples() -> dict[str, Callable[[Sizes], Step]]:
    """Those of the corpus."""
    found = {}
    for name in corpus.ADAPTERS.keys() - corpus.missing().keys():
        try:
            module = corpus.adapter(name)
        except Exception as error:  # a release of its package that the adapter was not written for
            print(f"{name} left out: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        found |= {f"{module.PACKAGE}: {key}": make for key, make in module.PROGRAMS.items()}
    return {name: found[name] for name in PEOPLES if name in found}


def main(options: Options) -> None:
    """Runs all programs and prints a line for each."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves a GPU's memory to the other processes
    if options.alone:
        run_alone(options)
        return
    if options.measured is not None:
        found = load(options.measured)
        replace(found, rows=estimated_anew(found)).save(options.measured)
        return
    if jax.default_backend() == "cpu" and not options.smoke:
        raise SystemExit("no GPU or TPU found: install one of the extras cuda13 and tpu on a machine that has one")
    begun, rows = time.monotonic(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CACHE | {"JAX_COMPILATION_CACHE_DIR": folder})
        options = replace(options, calibration=options.calibration or Path(folder) / "machine.json")
        names = compiled(options, list(programs(options)), begun + COMPILATION * 60 * options.minutes)
        calibrate(options)
        rows.append({"kind": "calibration", "name": "rates", "table": json.loads(options.calibration.read_text())})
        for name, process in ahead(options, names):
            if (row := _finished(name, process)) is not None:
                rows.append(row)
                print(f"{time.monotonic() - begun:4.0f} s  {_line(row)}", flush=True)
                _save(rows, options)
            if time.monotonic() > begun + 60 * options.minutes:
                print(f"{options.minutes:g} minutes are over after {name}", flush=True)
                break
    if not any(row["kind"] == "step" for row in rows):
        raise SystemExit("no program ran")


def compiled(options: Options, names: Sequence[str], deadline: float) -> list[str]:
    """Compiles programs, several at once; returns the names of those that are in the cache in time."""
    at_once = options.side_by_side or max(1, (os.cpu_count() or 2) // 2)
    waiting, running, done = list(names), dict[str, subprocess.Popen[str]](), list[str]()
    while (waiting or running) and time.monotonic() < deadline:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = _process(replace(options, alone=name, calibration=None))
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                print(f"{'failed' if process.returncode else 'compiled'}: {name}", flush=True)
                done += [] if process.returncode else [name]
        time.sleep(0.1)
    for process in running.values():
        process.kill()
    if left := [*waiting, *running]:
        print("not compiled in time:", "; ".join(left), flush=True)
    return [name for name in names if name in done]


def calibrate(options: Options) -> None:
    """Measures the device, prints its rates and writes them into the calibration file, if there is none."""
    assert options.calibration is not None
    if not options.calibration.exists():
        command = ["calibrate", "--out", str(options.calibration), "--mesh", "data=1", *["--quick"] * options.smoke]
        subprocess.run([sys.executable, "-m", "sharding.launch", *command], check=True)


def ahead(options: Options, names: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(name, process) of each program, some of which load while another runs."""
    loading: deque[tuple[str, subprocess.Popen[str]]] = deque()
    try:
        for name in names:
            loading.append((name, _process(replace(options, alone=name))))
            if len(loading) > AHEAD:
                yield loading.popleft()
        while loading:
            yield loading.popleft()
    finally:
        for _, process in loading:
            process.kill()


def _process(options: Options) -> subprocess.Popen[str]:
    """That of a program."""
    command = [sys.executable, __file__, "--alone", options.alone, *["--smoke"] * options.smoke]
    if options.calibration is not None:
        command += ["--calibration", str(options.calibration)]
    if options.profile is not None:
        command += ["--profile", str(options.profile / file_name(options.alone))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _finished(name: str, process: subprocess.Popen[str]) -> Row | None:
    """Lets a program run that is loaded; None if it failed, whose error is on the standard error."""
    text, _ = process.communicate("run\n")
    if process.returncode:
        print(f"failed: {name}", flush=True)
        return None
    return json.loads(text.splitlines()[-1])


def run_alone(options: Options) -> None:
    """Compiles a program or loads it from the cache, and runs it when told to."""
    make = programs(replace(options, programs=(options.alone,)))[options.alone]
    with sharding.mesh(dict(MESH), devices=jax.devices()[:1]):
        jitted, step = jitted_step(make)
        run = jitted.lower(*step.args).compile()
        if options.calibration is None:
            for like in {_filling(*item) for item in jax.tree_util.tree_leaves_with_path(step.args)} - {None}:
                _filled.lower(jax.random.key(0), *like).compile()
            return
        expected = predicted(jitted.complete(*step.args), options.calibration)
        facts = cost.read_compiled(run)
        sys.stdin.readline()
        before = _peak_bytes()
        seconds = times(run, [random_like(tree, seed) for seed, tree in enumerate(step.args)], options.profile)
        after = _peak_bytes()
    if options.profile is not None:
        (options.profile / "module.txt").write_text(run.as_text() or "")
    row: Row = {
        "kind": "step",
        "name": options.alone,
        "seconds": rounded(statistics.median(seconds)),
        "low": rounded(min(seconds)),
        "high": rounded(max(seconds)),
        **expected,
        "compiled_peak_bytes": facts.peak_bytes,
        "peak_bytes": after if after is not None and before is not None and after > before else None,
    }
    print(json.dumps(row))


def jitted_step(make: Callable[[Sizes], Step]) -> tuple[Any, Step]:
    """A program on the mesh in context, with its state donated, and its arguments."""
    with tracing_context():
        step = make(MESH)
    return sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0), step


def predicted(completion: Any, calibration: Path) -> Row:
    """What is said of a program before it runs."""
    estimate = completion.estimate()
    return {
        "estimated_seconds": rounded(estimate.seconds),
        "calibrated_seconds": rounded(completion.estimate(str(calibration)).seconds),
        "seconds_at_peak": rounded(estimate.seconds_at_peak),
        "predicted_peak_bytes": completion.memory().peak_bytes,
    }


def estimated_anew(result: Result) -> list[Row]:
    """The rows with what this tree says of their programs."""
    chip = hardware.recognised(result.platform, str(result.device))
    assert chip is not None
    (rates,) = result.of_kind("calibration")
    makers, rows = own_programs() | peoples(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        calibration = Path(folder) / "machine.json"
        calibration.write_text(json.dumps(rates["table"]))
        for row in result.rows:
            if row["kind"] == "step":
                with sharding.mesh(dict(MESH), devices=f"{chip.name}:1x1"):
                    jitted, step = jitted_step(makers[row["name"]])
                    row |= predicted(jitted.complete(*step.args), calibration)
                print(_line(row), flush=True)
            rows.append(row)
    return rows


def times(run: Any, args: list[Any], profile: Path | None) -> list[float]:
    """Seconds of a step, of some turns of many; the first argument is donated, and its successor comes back first."""

    def steps(number: int) -> float:
        begun = time.perf_counter()
        for _ in range(number):
            results = run(*args)
            args[0] = successor(results, args[0])
        jax.block_until_ready(args[0])
        return (time.perf_counter() - begun) / number

    first = steps(WARM)
    first = min(first, steps(1))
    number = max(1, min(MOST_CALLS, round(LEAST_SECONDS / first)))
    found = [steps(number) for _ in range(TURNS)]
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            steps(1)
    return found


def successor(results: Any, state: Any) -> Any:
    """The new state in the results of a step: what has the shapes of the donated one."""
    parts = [results, *(results if isinstance(results, tuple | list) else ())]
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
    for part in parts:
        leaves = jax.tree.leaves(part)
        if [(leaf.shape, leaf.dtype) for leaf in leaves] == shapes:
            return jax.tree.unflatten(jax.tree.structure(state), leaves)
    raise ValueError("the step returns no new state")


def random_like(tree: Any, seed: int) -> Any:
    """Arrays of these shapes: small floats around 0, positive where a root is taken, and integers below 1,000."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [_random(path, leaf, seed + n) for n, (path, leaf) in enumerate(leaves)])


def _random(path: Any, leaf: Any, seed: int) -> jax.Array:
    key, like = jax.random.key(seed), _filling(path, leaf)
    if like is not None:
        return _filled(key, *like)
    return jax.random.split(key, leaf.shape) if leaf.shape else key


def _filling(path: Any, leaf: Any) -> tuple[tuple[int, ...], Any, bool] | None:
    """Shape, dtype, and whether the numbers are positive; None for keys."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return None
    names = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
    return leaf.shape, jnp.dtype(leaf.dtype), bool(names & POSITIVE)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _filled(key: jax.Array, shape: tuple[int, ...], dtype: Any, is_positive: bool) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, min(1000, jnp.iinfo(dtype).max)).astype(dtype)
    return jax.random.uniform(key, shape, minval=0 if is_positive else -0.035, maxval=0.035).astype(dtype)


def _peak_bytes() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _save(rows: list[Row], options: Options) -> None:
    if options.json is not None or not options.smoke:
        file = options.json or FOLDER / f"step_times-{file_name(str(device_name()))}-jax-{jax.__version__}.json"
        measured("step_times", options, rows, num_devices=1).save(file)


def _line(row: Row) -> str:
    measured_peak = row["peak_bytes"] or row["compiled_peak_bytes"]
    return (
        f"{row['name']:45} {1e3 * row['seconds']:9.2f} ms, estimated {row['estimated_seconds'] / row['seconds']:5.2f} "
        f"of it, calibrated {row['calibrated_seconds'] / row['seconds']:5.2f}; peak {measured_peak / 1e9:6.2f} GB, "
        f"predicted {row['predicted_peak_bytes'] / measured_peak:5.2f} of it"
    )


def summary(result: Result) -> str:
    """How close the estimates are."""
    rows = result.of_kind("step")
    texts = []
    for name in ("estimated", "calibrated"):
        ratios = sorted(row[f"{name}_seconds"] / row["seconds"] for row in rows)
        near = sum(0.8 <= r <= 1.25 for r in ratios)
        texts.append(
            f"{name} time over the measured one: median {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, within 25 % in {near} of {len(rows)}"
        )
    peaks = [row["predicted_peak_bytes"] / row["peak_bytes"] for row in rows if row["peak_bytes"]]
    near = sum(abs(r - 1) <= 0.1 for r in peaks)
    return "; ".join([*texts, f"predicted peak within 10 % of the allocator's in {near} of {len(peaks)}"])


def table(result: Result) -> list[str]:
    """All programs."""
    lines = [
        "| program | measured, ms | estimated | calibrated | MFU | peak, GB | predicted | compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result.of_kind("step"):
        peak = row["peak_bytes"] or row["compiled_peak_bytes"]
        seconds = [
            row[name] / row["seconds"] for name in ("estimated_seconds", "calibrated_seconds", "seconds_at_peak")
        ]
        peaks = [row[name] / peak for name in ("predicted_peak_bytes", "compiled_peak_bytes")]
        cells = [f"{1e3 * row['seconds']:.2f}", *map("{:.2f}".format, [*seconds, peak / 1e9, *peaks])]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
