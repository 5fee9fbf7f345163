"""`sharding explain`: how a train step would be split over a mesh, and why. No device is needed, nothing is run."""

import math
from typing import Any

import sharding

from ..models import layouts
from . import tasks
from .config import Explain, Optimization, batch_parts, check_batch, parse_mesh

LEAST_EXAMPLES = 16
"""In a batch whose size is not given."""


def run(config: Explain) -> None:
    """Print what `config` asks for."""
    completion = complete(config)
    if config.check is not None:
        sharding.check_lock(completion, config.check)
        print(f"as {config.check} says")
    if config.lock is not None:
        completion.lock(config.lock)
        print(f"written to {config.lock}")
    if config.report is not None:
        completion.report(config.report)
        print(f"written to {config.report}")
    if config.why is not None:
        print(completion.why(config.why))
    if config.communication:
        print(completion.communication())
    if config.memory:
        print(completion.memory())
    if not (config.check or config.lock or config.report or config.why or config.communication or config.memory):
        print(completion)


def complete(config: Explain) -> Any:
    """The completion of the train step over the mesh of `config`, of real shapes and described devices."""
    family, model = tasks.find(config.model)
    task = family.build(config.model.name, model, Optimization(), steps=1000, seed=0)
    axes = parse_mesh(config.mesh)
    # Without a description, devices of no particular kind, as many as the mesh needs.
    devices = config.devices or math.prod(max(size, 1) for size in axes.values())
    with sharding.mesh(axes, devices=devices) as mesh:
        sizes = dict(mesh.shape)
        parts = batch_parts(sizes)
        batch = config.batch or parts * math.ceil(LEAST_EXAMPLES / parts)
        check_batch(batch, sizes)
        step = sharding.jit(task.train_step, in_shardings=(None, layouts.batch(mesh.axis_names)), donate_argnums=(0,))
        return step.complete(task.state_shapes, task.batch_shapes(batch))
