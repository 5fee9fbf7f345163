"""The overhead of checkpointing: step time of the default model with a checkpoint every twenty steps and without.

    python -m tests.benchmarks.saving                     # a few minutes
    python -m tests.benchmarks.saving --json saving.json

Rounds of twenty steps alternate: one saves before its first step, as a run does, and the checkpoint is written
asynchronously during the steps; the other saves nothing, and starts once the write is complete. A ratio is of two
consecutive rounds, which a busy machine slows down equally. Reported is the median with the quartiles.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

import sharding
from sharding import checkpoint
from sharding.launch import device_setup, jitted_workload, workloads
from sharding.launch.config.mesh_config import parse_mesh
from sharding.launch.config.train_config import Train

from . import command_line
from .ratios import Ratio, rounded, unknown
from .result_file import Result, measured


@dataclass(frozen=True, kw_only=True)
class Options:
    """The number of rounds."""

    every: int = 20
    """Steps between checkpoints."""
    pairs: int = 8
    """Pairs of rounds, with and without a checkpoint."""
    json: Path | None = None
    """Output file of the figures."""


def main(options: Options) -> None:
    """Measures and prints the ratios."""
    config = Train()
    family, model = workloads.find(config.model)
    recipe = config.applied_to(family.recipe(config.model.name))
    axes = device_setup.set_up_devices(parse_mesh(config.mesh), num_devices=config.devices)
    workload = family.build(config.model.name, model, recipe.optimization, steps=recipe.steps, seed=0, sample=0)
    source = workload.source(recipe.batch, 0)
    with tempfile.TemporaryDirectory() as folder, sharding.mesh(axes) as mesh:
        assert isinstance(mesh, jax.sharding.Mesh)
        run = jitted_workload.jit_workload(workload, mesh, batch_size=recipe.batch)
        state, step = run.initial_state(0), 0
        with checkpoint.Saver(folder) as saver:

            def seconds_of_a_round(*, saves: bool) -> float:
                nonlocal state, step
                begun = time.perf_counter()
                if saves:
                    saver.save(step, state, {"step": step})
                for _ in range(options.every):
                    state, measured = run.train_step(state, run.put(source.train_batch(step)))
                    jax.device_get(measured)
                    step += 1
                seconds = time.perf_counter() - begun
                saver.wait()
                return seconds

            seconds_of_a_round(saves=True)  # compiles
            pairs = [(seconds_of_a_round(saves=True), seconds_of_a_round(saves=False)) for _ in range(options.pairs)]
        num_bytes = checkpoint.describe(folder).num_bytes
    seconds = statistics.median(without for _, without in pairs) / options.every
    row = {
        "name": f"a checkpoint every {options.every} steps over none",
        "model": workload.name,
        "mesh": device_setup.format_axes(axes),
        "checkpoint_bytes": num_bytes,
        "step_seconds": rounded(seconds),
        **Ratio.of_pairs(*zip(*pairs, strict=True)).as_row(),
    }
    result = measured("saving", options, [row], num_devices=mesh.size)
    print(row, result.where, sep="\n")
    if options.json is not None:
        result.save(options.json)


def summary(result: Result) -> str:
    """The ratio of step times."""
    (row,) = result.rows
    ratio = Ratio.of_row(row)
    return f"{row['name']} {ratio}; {row['model']}, {row['checkpoint_bytes'] / 1e6:.1f} MB{unknown([ratio])}"


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
