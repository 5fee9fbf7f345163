"""What saving costs a run: the default model's steps with a checkpoint every twenty of them beside steps without.

    python -m tests.benchmarks.saving                     # a few minutes
    python -m tests.benchmarks.saving --json saving.json

Rounds of twenty steps alternate: one saves before its first step, as a run does, and the checkpoint is written while
the steps go on; the other saves nothing, and begins once nothing is left to write. A ratio is that of two neighbouring
rounds, which a busy machine slows down alike. The published one is the median, with the quartiles beside it.
"""

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro

import sharding
from sharding import checkpoint
from sharding.launch import devices, program, tasks
from sharding.launch.config import Train, parse_mesh

from .contenders import machine, write


@dataclass(frozen=True, kw_only=True)
class Options:
    """How often to measure."""

    every: int = 20
    """Steps between checkpoints."""
    pairs: int = 8
    """Rounds with a checkpoint, and as many without."""
    json: Path | None = None
    """Where to write the figures."""


def main(options: Options) -> None:
    """Print the ratios."""
    config = Train()
    family, model = tasks.find(config.model)
    recipe = config.over(family.recipe(config.model.name))
    axes = devices.enough(parse_mesh(config.mesh), num_devices=config.devices)
    task = family.build(config.model.name, model, recipe.optimization, steps=recipe.steps, seed=0, sample=0)
    source = task.source(recipe.batch, 0)
    with tempfile.TemporaryDirectory() as folder, sharding.mesh(axes) as mesh:
        assert isinstance(mesh, jax.sharding.Mesh)
        run = program.over(task, mesh, batch_size=recipe.batch)
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
    ratios = [with_saving / without for with_saving, without in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {
        "machine": machine(),
        "model": task.name,
        "mesh": devices.written(axes),
        "checkpoint megabytes": round(num_bytes / 1e6, 1),
        "seconds a step": round(statistics.median(without for _, without in pairs) / options.every, 4),
        f"a save per {options.every} steps over none": [round(each, 4) for each in (low, middle, high)],
    }
    write(found, options.json)


if __name__ == "__main__":
    main(tyro.cli(Options))
