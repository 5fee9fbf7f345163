"""The host's memory that saving and restoring a state of 1 GB take beside it, per process, over fifty saves.

    python -m tests.benchmarks.host_memory                          # some minutes; twice the state on disk
    python -m tests.benchmarks.host_memory --json host_memory.json

Eight arrays on eight virtual CPU devices, of one process or of four, sharded or replicated (then of an eighth of the
bytes). Of each save and of a restore is measured how far the resident memory rises above what it was before; of the
saves, how far it has risen from the tenth to the last. Freed memory goes back to the system at once
(`MALLOC_MMAP_THRESHOLD_`).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import command_line
from .result_file import Result, measured

ARRAYS, DEVICES = 8, 8
WORKER = """
import ctypes, json, sys
from pathlib import Path
import jax, numpy as np
import sharding
from sharding import P, checkpoint

sharding.initialize()
folder, axes, arrays, array_bytes, saves = *sys.argv[1:3], *map(int, sys.argv[3:])

def kilobytes(name):
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0])

def peak_beyond_now(f):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = kilobytes("VmRSS")
    f()
    return 1024 * (kilobytes("VmHWM") - before)

shape = (8, array_bytes // 32)
with sharding.mesh(data=8) as mesh:
    over = jax.sharding.NamedSharding(mesh, P("data") if axes == "sharded" else P())
part = lambda k, index: np.full([len(range(*i.indices(n))) for i, n in zip(index, shape)], k, np.float32)
state = {str(k): jax.make_array_from_callback(shape, over, lambda index: part(k, index)) for k in range(arrays)}
saving, resident = [], []
with checkpoint.Saver(folder, keep=1) as saver:
    for step in range(saves):
        saving.append(peak_beyond_now(lambda: (saver.save(step, state), saver.wait())))
        ctypes.CDLL(None).malloc_trim(0)
        resident.append(1024 * kilobytes("VmRSS"))
checkpoint.restore(folder, state)  # once for what is loaded and compiled
restoring = peak_beyond_now(lambda: jax.block_until_ready(checkpoint.restore(folder, state)))
own = sum(shard.data.nbytes for array in state.values() for shard in array.addressable_shards)
print("FOUND " + json.dumps([max(saving[1:]), resident[-1] - resident[min(9, saves - 1)], restoring - own]), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The size of the state."""

    state_bytes: int = 2**30
    """Of all arrays of a sharded state."""
    saves: int = 50
    json: Path | None = None
    """Output file of the figures."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The most of all processes, in bytes beside what a process has of the state."""

    name: str
    processes: int
    array_bytes: int
    saving_bytes: int
    """Of all saves but the first, which loads and compiles."""
    growth_bytes: int
    """Of the resident memory, from the tenth save to the last."""
    restoring_bytes: int


def row(axes: str, processes: int, array_bytes: int, saves: int) -> Row:
    """Measures one state."""
    settings = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(2**17), "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "worker.py")
        script.write_text(WORKER)
        launch = [sys.executable, "-m", "sharding.launch", "launch", "--processes", str(processes), "--all-lines"]
        launch += ["--devices-per-process", str(DEVICES // processes), "--", str(script), f"{folder}/saved", axes]
        launch += map(str, (ARRAYS, array_bytes, saves))
        done = subprocess.run(launch, capture_output=True, text=True, env=os.environ | settings)
    found = [json.loads(line.partition("FOUND ")[2]) for line in done.stdout.splitlines() if "FOUND " in line]
    if len(found) != processes:
        raise RuntimeError(done.stdout + done.stderr)
    saving, growth, restoring = (max(each) for each in zip(*found, strict=True))
    return Row(
        name=axes,
        processes=processes,
        array_bytes=array_bytes,
        saving_bytes=saving,
        growth_bytes=growth,
        restoring_bytes=restoring,
    )


def main(options: Options) -> None:
    """Prints a table and writes the figures."""
    rows = []
    for axes, part in (("sharded", 1), ("replicated", DEVICES)):
        for processes in (1, 4):
            rows.append(row(axes, processes, options.state_bytes // ARRAYS // part, options.saves))
            print(rows[-1], flush=True)
    result = measured("host_memory", options, rows, num_devices=DEVICES)
    print(*table(result), result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """The most, in sizes of the largest array."""
    return "; ".join(_lines(result))


def _lines(result: Result) -> Iterator[str]:
    for one in (Row(**each) for each in result.rows):
        processes = f"{one.processes} process{'es' * (one.processes > 1)}"
        yield (
            f"{one.name}, {processes}: saving {one.saving_bytes / 1e6:.0f} MB, restoring "
            f"{one.restoring_bytes / 1e6:.0f} MB, with arrays of {one.array_bytes / 1e6:.0f} MB"
        )


def table(result: Result) -> list[str]:
    """All figures as a Markdown table."""
    found: list[Any] = [Row(**one) for one in result.rows]
    head = "| state | processes | array, MB | saving, MB | growth over the saves, MB | restoring, MB |"
    lines = [head, "|---|---|---|---|---|---|"]
    for one in found:
        sizes = one.array_bytes, one.saving_bytes, one.growth_bytes, one.restoring_bytes
        lines.append(f"| {one.name} | {one.processes} | " + " | ".join(f"{size / 1e6:.1f}" for size in sizes) + " |")
    return lines


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
