"""`sharding train`: complete the train step over the mesh, run it, and keep what came of it.

The completion comes first: it says how every array of the state is split, and the initial state is made in those parts.
A run that is stopped, by Ctrl-C, SIGTERM or a crash, goes on with `--resume` from its newest checkpoint, also on
another mesh.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import sharding
from sharding import ShardingError, checkpoint, processes

from . import curve, devices, folder, metrics, report, tasks, text
from . import program as programs
from .config import Recipe, Train, as_json, batch_parts, check_batch, check_zero, parse_mesh
from .console import Console
from .interrupt import Interrupt
from .task import Batch, Source, TrainState

MOST_SKIPPED = 10
"""Steps one after the other that may be skipped."""


def run(config: Train) -> None:
    """Train as `config` says, and leave metrics, checkpoints, curve and report in its folder.

    Of several processes the first one writes, into a folder that all of them see.
    """
    sharding.initialize()
    with Interrupt() as interrupt, folder.writing(config.out):
        _run(config, interrupt)


def _run(config: Train, interrupt: Interrupt) -> None:
    family, model = tasks.find(config.model)
    recipe = config.over(family.recipe(config.model.name))
    if config.text.given:
        tasks.check_reads_text(config.model.name, family)
    axes = devices.enough(parse_mesh(config.mesh), num_devices=config.devices)
    config = _started_again(config)
    axes = tasks.with_own_axes(axes, family)
    tasks.check_experts(config.model.name, model, axes)
    accumulate = recipe.optimization.accumulate
    pipelining = config.pipeline.over(axes, accumulate)
    check_batch(recipe.batch, axes, accumulate, pipelining)
    check_zero(recipe.optimization.zero, axes)
    sequencing = config.sequence.over(axes, pipelining)
    tasks.check_splits_sequences(config.model.name, family, sequencing)
    optimization = replace(recipe.optimization, pipeline=pipelining, sequence=sequencing)
    tokenized = text.read(config.text) if config.text.given else None
    model = text.fitted(model, tokenized) if tokenized else model
    tasks.check_sequence_parallel(config.model.name, family, model, optimization, axes)
    task = family.build(
        config.model.name, model, optimization, steps=recipe.steps, seed=config.seed, sample=recipe.sample
    )
    tasks.check_accumulates(task, accumulate)
    if recipe.sample and not task.sampler:
        raise ShardingError(
            f"--model {task.name} --sample {recipe.sample}",
            there="a model that generates nothing",
            must="a sample needs a model that predicts what comes next",
            fix="--sample 0",
        )
    if _leads():
        folder.make(config.out)
    task = text.over(task, tokenized, batch_size=recipe.batch, seed=config.seed) if tokenized else task
    source = task.source(recipe.batch, config.seed)
    settings = as_json(config) | as_json(recipe)
    settings |= {"model_config": as_json(model), f"{source.name}_sha256": source.sha256}
    if _leads() and config.resume:
        folder.check_resumable(config.out, settings, config.resume_step)
    elif _leads():
        folder.set_aside(config.out)
    processes.barrier("folder")
    needed = jax.devices()[: math.prod(axes.values())]
    with sharding.mesh(axes, devices=needed) as mesh:
        assert isinstance(mesh, jax.sharding.Mesh)
        _compare(settings, source, mesh)
        session = _Session(
            config=config,
            recipe=recipe,
            settings=settings,
            source=source,
            axes=axes,
            interrupt=interrupt,
            program=programs.over(task, mesh, batch_size=recipe.batch),
        )
        session.run()


def _leads() -> bool:
    return processes.index() == 0


def _started_again(config: Train) -> Train:
    """`config`, going on from the newest checkpoint where a launcher starts this once more."""
    if not int(os.environ.get(processes.RESTART, 0)):
        return config
    there = checkpoint.latest_step(config.out / folder.CHECKPOINTS) is not None
    first = processes.said("resume", str(there))[0]
    return replace(config, resume=True, resume_step=None) if first == str(True) else config


def _compare(settings: dict[str, Any], source: Source, mesh: jax.sharding.Mesh) -> None:
    """Raise an error where another process would train otherwise."""
    if processes.count() == 1:
        return
    facts = {
        "settings": json.dumps(settings, indent=0, sort_keys=True, default=str),
        "mesh": "\n".join(f"{device.process_index}: device {device.id}" for device in mesh.devices.flat),
        "data order": "\n".join(_digest(source.train_batch(step)) for step in (0, 1)),
    }
    processes.agree(facts, about="train")


def _digest(batch: Batch) -> str:
    parts = [np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(batch)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class _Session:
    """One run of the loop: what stays the same through it, and the files that it writes."""

    def __init__(
        self,
        *,
        config: Train,
        recipe: Recipe,
        settings: dict[str, Any],
        source: Source,
        axes: devices.Axes,
        interrupt: Interrupt,
        program: programs.Program,
    ):
        self.config, self.recipe, self.settings = config, recipe, settings
        self.source, self.axes, self.program, self.task = source, axes, program, program.task
        self.interrupt = interrupt
        self.checkpoints = config.out / folder.CHECKPOINTS
        self.heldout: tuple[int, dict[str, float]] | None = None
        """The newest held-out figures and their step."""
        self.heldout_batches = source.heldout_batches()
        self.rows = program.rows(recipe.batch)
        self.skipped = 0
        """Steps that were not finite, the last ones, one after the other."""
        self.damaged: Mapping[int, str] = {}
        """What is wrong with checkpoints newer than the one to go on from."""

    def run(self) -> None:
        state, first = self._begin()
        self.console = Console(task=self.task, num_steps=self.recipe.steps, first_step=first, quiet=not _leads())
        self._introduce(first)
        with ExitStack() as stack:
            self.saver = stack.enter_context(
                checkpoint.Saver(self.checkpoints, keep=self.config.keep, keep_best=self.config.keep_best)
            )
            self.metrics = stack.enter_context(self._open_metrics(first))
            with self.console:
                state, last = self._loop(state, first)
            self._save(state, last)
            self.saver.wait()
            if last < self.recipe.steps:
                self.console.say(f"stopped after step {last}; --resume goes on from there")
                return
            self._conclude(state)

    def _begin(self) -> tuple[TrainState, int]:
        """The state to start from and the number of steps it has taken."""
        if not self.config.resume:
            return self._initial_state(), 0
        like = self.program.sharded_shapes()
        if self.config.resume_step is not None:
            state = checkpoint.restore(self.checkpoints, like, self.config.resume_step)
        else:
            found = checkpoint.restore_newest(self.checkpoints, like)
            state, self.damaged = found.state, found.damaged
        first = int(state.step)
        if _leads():
            folder.set_newer_aside(self.config.out, first)
        processes.barrier("newer checkpoints")
        return state, first

    def _initial_state(self) -> TrainState:
        if self.config.init is None:
            return self.program.initial_state(self.config.seed)
        # Read first: a file that does not fit is an error before anything compiles.
        params = checkpoint.read_tensors(self.config.init, self.program.sharded_shapes().params)
        return replace(self.program.initial_state(self.config.seed), params=params)

    def _introduce(self, first: int) -> None:
        num_params = sum(leaf.size for leaf in jax.tree.leaves(self.task.state_shapes.params))
        self.console.say(f"{self.source.name:6}  {self.source.description}")
        self.console.say(f"model   {self.task.name}, {num_params:,} parameters, {self.task.about}")
        self.console.say(f"mesh    {self._written_mesh()}, jax {jax.__version__}")
        self.console.say(f"folder  {self.config.out}" + (f", resumed after step {first}" if first else ""))
        for step, reason in self.damaged.items():
            aside = f"is now in {folder.CHECKPOINTS_BEFORE}"
            self.console.say(f"damaged the checkpoint of step {step}, which {aside}: {reason}")

    def _open_metrics(self, first: int) -> metrics.MetricsFile:
        if not _leads():
            return metrics.MetricsFile(path=None)
        return metrics.resume(self.config.out, step=first) if first else metrics.start(self.config.out)

    def _loop(self, state: TrainState, first: int) -> tuple[TrainState, int]:
        """Take the steps after `first` until the last one or an interrupt; the state and the number of steps taken."""
        step, batch = first, self._batch(first)
        while step < self.recipe.steps and not self.interrupt.before(step):
            begun = time.monotonic()
            state, measured = self.program.train_step(state, batch)
            # The next batch is made while the devices work on this one.
            used, batch = batch, self._batch(step + 1)
            figures = {name: float(value) for name, value in jax.device_get(measured).items()}
            step += 1
            processes.done(step)
            if np.isfinite(figures["loss"]) and np.isfinite(figures["gradient_norm"]):
                self.skipped = 0
                self._log(step, figures, time.monotonic() - begun)
            else:
                self._skip(step, figures, state, used)
            if _due(step, self.recipe.eval_every) or step == self.recipe.steps:
                self._evaluate(state, step)
            if _due(step, self.recipe.checkpoint_every) and step < self.recipe.steps:
                self._save(state, step)
                processes.working()
        processes.finished()
        return state, step

    def _batch(self, step: int) -> Batch:
        return self.program.put(self.source.train_batch(step, self.rows))

    def _skip(self, step: int, figures: dict[str, float], state: TrainState, batch: Batch) -> None:
        """Say what was not finite and where it began; the state is the one before the step. Raises unless to go on."""
        self.skipped += 1
        there = [
            f"the loss is {figures['loss']:g}, the norm of the gradient {figures['gradient_norm']:g}",
            f"batch {step - 1} of seed {self.config.seed}",
            *(f"first {origin}" for origin in self.program.origins(state, batch)),
        ]
        if self.config.nonfinite == "stop" or self.skipped > MOST_SKIPPED:
            raise ShardingError(
                f"step {step}" + (f", the {self.skipped}th one after the other" if self.skipped > 1 else ""),
                there=there,
                must="loss and gradient must stay finite",
                fix=["a lower --lr", "a longer --warmup", "--nonfinite skip"],
            )
        self.console.say(f"step {step} is skipped: {'; '.join(there)}")
        self.metrics.log(step, {"skipped": self.skipped})

    def _log(self, step: int, figures: dict[str, float], seconds: float) -> None:
        figures[self.task.rate] = self.recipe.batch * self.task.items_per_example / seconds
        figures["seconds"] = seconds
        figures["memory_bytes"] = metrics.memory_bytes()
        self.metrics.log(step, figures)
        self.console.step(step, figures)

    def _evaluate(self, state: TrainState, step: int) -> None:
        figures = self.program.heldout(state, self.heldout_batches)
        self.heldout = step, figures
        self.metrics.log(step, figures)
        self.console.heldout(step, figures)

    def _save(self, state: TrainState, step: int) -> None:
        heldout = self.heldout[1] if self.heldout and self.heldout[0] == step else {}
        progress = {"step": step, "examples": step * self.recipe.batch, "heldout": heldout}
        figure = heldout.get(self.task.heldout[0].name)
        self.saver.save(step, state, self.settings | {folder.PROGRESS: progress}, figure=figure)

    def _conclude(self, state: TrainState) -> None:
        """Write curve and report, and say how it ended."""
        sample = self._sample(state) if self.recipe.sample else ""
        if not _leads():
            return
        heldout = {figure.name: self.metrics.series(figure.name)[-1][1] for figure in self.task.heldout}
        picture = self._curve()
        (self.config.out / folder.CURVE).write_text(picture)
        facts = self._facts(heldout)
        report.write(
            self.config.out,
            settings=self.settings,
            facts=facts,
            curve=picture,
            completion=self.program.completion,
            sample=sample,
        )
        if sample:
            self.console.say(f"\nsample\n{sample}\n")
        self.console.say(f"held out  {self.task.written_heldout(heldout, lambda figure: figure.last_digits)}")
        self.console.say(f"report    {self.config.out / report.FILE_NAME}, {report.PLAN_NAME}")

    def _curve(self) -> str:
        loss, heldout = self.task.loss, self.task.heldout[0]
        return curve.svg(
            [(step, value * loss.scale) for step, value in self.metrics.series(loss.name)],
            [(step, value * heldout.scale) for step, value in self.metrics.series(heldout.name)],
            title=f"{self.task.name} on {devices.written(self.axes)}",
            unit=loss.unit,
        )

    def _facts(self, heldout: dict[str, float]) -> dict[str, str]:
        seconds = [value for _, value in self.metrics.series("seconds")]
        return {
            "held out": self.task.written_heldout(heldout, lambda figure: 4),
            self.source.name: self.source.description,
            f"{self.source.name} sha256": self.source.sha256,
            "mesh": self._written_mesh(),
            "steps": f"{self.recipe.steps} of {self.task.written_batch(self.recipe.batch)}",
            "time in steps": f"{sum(seconds):.0f} s, {1e3 * float(np.median(seconds)):.0f} ms a step in the middle",
            "memory of the process": f"{metrics.memory_bytes() / 1e6:,.0f} MB",
            "jax": jax.__version__,
        }

    def _written_mesh(self) -> str:
        several = f" of {processes.count()} processes" if processes.count() > 1 else ""
        return f"{devices.written(self.axes)} on {self.program.mesh.size} {jax.default_backend()} devices{several}"

    def _sample(self, state: TrainState) -> str:
        # One prompt for each part of a batch; the first is shown.
        return self.program.sample(state, seed=self.config.seed, num_prompts=batch_parts(self.axes))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
