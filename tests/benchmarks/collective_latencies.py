"""The latencies of collectives by which XLA:GPU schedules, read from what its estimator logs for an H100.

    python -m tests.benchmarks.collective_latencies --json latencies.json  # ahead of time: extra `cuda13`, no GPU
    python -m tests.benchmarks.collective_latencies --store                # as `sharding/cost/gpu_collectives.json`

One program per number of devices has every kind of collective at every power of two of bytes, each after the other, so
that none are combined. The figures are those of XLA, from its own measurements on a host of eight H100s.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sharding.cost.gpu_latencies import COLLECTIVES_FILE, FIRST_LOG2_BYTES

from . import command_line

NUM_DEVICES = 2, 4, 8
LOG2_BYTES = range(FIRST_LOG2_BYTES, 30)
LOGGED = re.compile(r"Computed collective time for ([a-z-]+?)-start\S*: ([\d.e+-]+) us")
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_VMODULE": "sol_latency_estimator=10",
    "XLA_FLAGS": " ".join(
        f"--xla_gpu_{kind}_combine_threshold_bytes=0" for kind in ("all_reduce", "all_gather", "reduce_scatter")
    ),
}


@dataclass(frozen=True)
class Options:
    """Where the figures go."""

    json: Path | None = None
    """Output file of the figures."""
    store: bool = False
    """Replace the figures by which memory on GPUs is predicted."""
    compile_for: int = 0
    """Only compile the program for groups of so many devices: what this command starts itself."""


def compile_all(n: int) -> None:
    """Compiles every kind of collective at every size, in groups of `n` devices of a host of eight."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from sharding import cost

    jax.config.update("jax_platforms", "cpu")
    mesh = Mesh(np.array(cost.compile_only("h100:1x8")).reshape(-1, n), ("group", "device"))
    shapes = [(2**k // 4,) for k in LOG2_BYTES]
    ring = [(i, (i + 1) % n) for i in range(n)]

    def run(*arrays: jax.Array) -> list[jax.Array]:
        found, last = [], jnp.zeros(())
        for x in arrays:
            for collective in (
                lambda y: jax.lax.all_gather(y, "device", tiled=True),
                lambda y: jax.lax.psum_scatter(y, "device", tiled=True),
                lambda y: jax.lax.all_to_all(y.reshape(n, -1), "device", 0, 0, tiled=True),
                lambda y: jax.lax.psum(y, "device"),
                lambda y: jax.lax.ppermute(y, "device", ring),
            ):
                y = collective(x + last)
                last = (y * 1e-3).sum()  # the next collective waits for this one
                found.append((y * y).sum())
        return found

    args = [jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P())) for shape in shapes]
    jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(*args).compile()


def logged(n: int) -> dict[str, list[float]]:
    """Kind -> microseconds by size, in groups of `n` devices."""
    command = [sys.executable, "-m", __spec__.name, "--compile-for", str(n)]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for kind, microseconds in LOGGED.findall(done.stderr):
        found[kind].append(float(microseconds))
    wrong = {kind: len(times) for kind, times in found.items() if len(times) != len(LOG2_BYTES)}
    if wrong or not found:
        raise SystemExit(f"the estimator logged {wrong or 'nothing'}, not {len(LOG2_BYTES)} sizes of each kind")
    return found


def main(options: Options) -> None:
    """Prints the figures and writes them."""
    if options.compile_for:
        compile_all(options.compile_for)
        return
    table: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
    for n in NUM_DEVICES:
        for kind, times in logged(n).items():
            table[kind][n] = times
            print(f"{kind:18} {n} devices: {min(times):.0f} to {max(times):.0f} us", flush=True)
    lines = [
        f'  "{kind}": {{\n' + ",\n".join(f'    "{n}": {json.dumps(times)}' for n, times in by_devices.items()) + "\n  }"
        for kind, by_devices in sorted(table.items())
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    for path in [*([options.json] if options.json else []), *([COLLECTIVES_FILE] if options.store else [])]:
        path.write_text(text)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
