"""All that needs a GPU or TPU, in one command on one device: numbers and times of kernels, and training of a GPT.

    make test-gpu                                # or: python -m tests.benchmarks.accelerator
    python -m tests.benchmarks.accelerator --smoke    # on a CPU: tiny sizes, interpreted kernels, no times

Each implementation that runs on the device is compared with plain JAX in float32, values and gradients, and timed
beside the others (see `kernels`). GPT-2 124M is trained in bfloat16 by kernels and, if this Python has it, by PyTorch
(see `gpt2`), and by `sharding train`. Parts that don't fit in the minutes are left out and named, as are those that
fail. Figures go to `results/accelerator-<device>-jax-<version>.json`. The exit status is 1 if numbers differ or a part
fails.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import command_line, gpt2, kernels
from .kernel_cases import CASES, Case
from .ratios import Ratio, rounded
from .result_file import FOLDER, Result, Row, device_name, file_name, load, measured

TOLERANCE = 3e-2
"""Of bfloat16 results, relative to the largest value of the reference in float32."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    smoke: bool = False
    """Tiny sizes on a CPU, to see that the command works."""
    minutes: float = 8.0
    """After as many minutes no further part starts."""
    only: tuple[str, ...] = ()
    """Parts, by the start of their names; the file keeps its figures of the others."""
    steps: int = 30
    """Steps of `sharding train`."""
    json: Path | None = None
    """Output file of the figures; by default one of `results/`, by the device's name."""


def main(options: Options) -> None:
    """Runs all parts and writes the figures."""
    gpt2.share_memory()
    if jax.default_backend() == "cpu" and not options.smoke:
        raise SystemExit("no GPU or TPU found: install one of the extras cuda13 and tpu on a machine that has one")
    begun, rows, failed = time.monotonic(), list[Row](), list[str]()
    for name, part in parts(options):
        if options.only and not name.startswith(options.only):
            continue
        if time.monotonic() - begun > 60 * options.minutes:
            print(f"left out, as {options.minutes:g} minutes are over: {name}")
            continue
        try:
            rows += part()
        except Exception as error:
            traceback.print_exception(error)
            failed.append(name)
        print(f"{time.monotonic() - begun:.0f} s: {name}", flush=True)
        _save(rows, options)
    wrong = [row["name"] for row in rows if row["kind"] == "numbers" and row["error"] > TOLERANCE]
    if wrong or failed:
        messages = [*(["numbers differ: " + ", ".join(wrong)] if wrong else []), *(f"failed: {one}" for one in failed)]
        raise SystemExit("; ".join(messages))


def _save(rows: list[Row], options: Options) -> None:
    if options.json is not None or not options.smoke:
        file = options.json or FOLDER / f"accelerator-{file_name(str(device_name()))}-jax-{jax.__version__}.json"
        found = {(row["kind"], row["name"]): row for row in rows}
        if options.only and file.exists():
            found = {(row["kind"], row["name"]): row for row in load(file).rows} | found
        measured("accelerator", options, found.values(), num_devices=1).save(file)


def summary(result: Result) -> str:
    """Training beside PyTorch, and each operation beside the fastest implementation."""
    found = {row["name"]: row for row in result.of_kind("training")}
    ours, peer = found.get("ours, kernels auto"), found.get("PyTorch, compiled")
    texts = [] if ours is None else [f"GPT-2 124M: {ours['tokens_per_second']:,.0f} tokens/s in bfloat16"]
    if ours is not None and peer is not None:
        texts += [
            f"step {Ratio.of_row(ours)} of PyTorch's compiled one",
            f"peak memory {ours['peak_bytes'] / peer['peak_bytes']:.2f} of its",
            f"{ours['predicted_peak_bytes'] / ours['peak_bytes']:.2f} of it predicted",
        ]
    ratios = {row["name"].partition(":")[0]: row["median"] for row in result.of_kind("kernel") if "best" in row}
    texts.append("`auto` over the fastest implementation: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    return "; ".join(texts)


def parts(options: Options) -> Iterator[tuple[str, Any]]:
    """(name, function that returns rows), the most important first."""
    if not options.smoke:
        yield "matmul", lambda: kernels.matmul(turns=20)
    training = gpt2.Options(
        smoke=options.smoke, kernels=("auto",), **({"batch": 2, "runs": 1} if options.smoke else {})
    )
    yield "GPT-2 124M", lambda: gpt2.contenders(training)
    for case in CASES:
        for has_gradients in case.directions:
            yield (
                kernels.label(case, has_gradients),
                lambda case=case, has_gradients=has_gradients: checked(case, has_gradients, options.smoke),
            )
    yield "sharding train", lambda: [trained(options)]


def checked(case: Case, has_gradients: bool, is_smoke: bool, turns: int = 20) -> list[Row]:
    """The rows of an operation: how far its results are from those in float32, and times."""
    args = kernels.arguments(case, has_gradients, is_smoke)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)
    with ThreadPoolExecutor(1) as pool:  # compiles beside the others
        reference = pool.submit(kernels.compiled, case, wide, has_gradients, only=("xla",))
        programs = kernels.compiled(case, args, has_gradients)
        expected = reference.result()[0].run()
    rows = []
    for one in programs:
        error = max(map(_error, jax.tree.leaves(one.run()), jax.tree.leaves(expected)))
        row = {"kind": "numbers", "name": f"{kernels.label(case, has_gradients)}: {one.implementation}"}
        rows.append(row | {"error": rounded(error)})
        print(f"{row['name']:60} differs by {error:.1e}", flush=True)
    return [*rows, *kernels.timed(case, has_gradients, programs, args, is_smoke, turns)]


def _error(found: jax.Array, expected: jax.Array) -> float:
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6)) if a.size else 0.0


def trained(options: Options) -> Row:
    """Medians of `sharding train` in a process of its own."""
    model = ["--model", "gpt-tiny", "--batch", "8"] if options.smoke else ["--model", "gpt-small", "--batch", "16"]
    steps = 4 if options.smoke else options.steps
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sharding.launch", "train", *model, "--steps", str(steps), "--out", folder]
        subprocess.run(
            [*command, "--mesh", "data=1", "--devices", "1", "--eval-every", "0", "--sample", "0"],
            check=True,
            capture_output=not options.smoke,
        )
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    later = [line for line in lines if "seconds" in line][len(lines) // 3 :]
    row: Row = {"kind": "training", "name": f"sharding train --model {model[1]}"}
    for key in ("tokens_per_second", "seconds", "mfu"):
        if values := [line[key] for line in later if key in line]:
            row[key] = None if options.smoke else rounded(statistics.median(values))
    print(row, flush=True)
    return row


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
