"""The training loop: steps, evaluation, checkpoints, metrics and the final report."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from sharding import ShardingError, checkpoint
from sharding.distributed import heartbeat, processes

from . import device_setup, loss_plot, metrics, run_folder, run_report, utilization
from .config.train_config import Recipe, Train
from .jitted_workload import JittedWorkload
from .progress import Console
from .stop_signals import StopRequest
from .workload import Batch, DataSource, TrainState

MAX_SKIPPED = 10
"""Maximum number of consecutive skipped steps."""


class TrainingLoop:
    """One run: its fixed inputs, and the files it writes."""

    def __init__(
        self,
        *,
        config: Train,
        recipe: Recipe,
        settings: dict[str, Any],
        source: DataSource,
        axes: device_setup.Axes,
        stop: StopRequest,
        jitted: JittedWorkload,
    ):
        self.config, self.recipe, self.settings = config, recipe, settings
        self.source, self.axes, self.jitted, self.workload = source, axes, jitted, jitted.workload
        self.stop = stop
        self.checkpoints = config.out / run_folder.CHECKPOINTS
        self.heldout: tuple[int, dict[str, float]] | None = None
        """Step and values of the newest held-out metrics."""
        self.heldout_batches = source.heldout_batches()
        self.rows = jitted.local_rows(recipe.batch)
        self.skipped = 0
        """Consecutive non-finite steps so far."""
        self.estimate = utilization.estimate(jitted.completion, jitted.mesh)
        self.corrupted: Mapping[int, str] = {}
        """Corrupted checkpoints newer than the one to resume from, by step."""

    def run(self) -> None:
        """Run the remaining steps and write the report; if stopped early, save a checkpoint instead."""
        state, first = self._begin()
        self.console = Console(
            workload=self.workload, num_steps=self.recipe.steps, first_step=first, quiet=not _is_process_0()
        )
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
                self.console.print(f"stopped after step {last}; continue with --resume")
                return
            self._conclude(state)

    def _begin(self) -> tuple[TrainState, int]:
        """The state to start from and the number of steps it has taken."""
        if not self.config.resume:
            return self._initial_state(), 0
        like = self.jitted.abstract_state()
        if self.config.resume_step is not None:
            state = checkpoint.restore(self.checkpoints, like, self.config.resume_step)
        else:
            found = checkpoint.restore_newest(self.checkpoints, like)
            state, self.corrupted = found.state, found.damaged
        first = int(state.step)
        if _is_process_0():
            run_folder.move_newer_aside(self.config.out, first)
        processes.barrier("newer checkpoints")
        return state, first

    def _initial_state(self) -> TrainState:
        if self.config.init is None:
            return self.jitted.initial_state(self.config.seed)
        # Read first: a file that does not fit is an error before anything compiles.
        params = checkpoint.read_tensors(self.config.init, self.jitted.abstract_state().params)
        return replace(self.jitted.initial_state(self.config.seed), params=params)

    def _introduce(self, first: int) -> None:
        num_params = sum(leaf.size for leaf in jax.tree.leaves(self.workload.state_shapes.params))
        self.console.print(f"{self.source.name:6}  {self.source.description}")
        self.console.print(f"model   {self.workload.name}, {num_params:,} parameters, {self.workload.summary}")
        self.console.print(f"mesh    {self._mesh_text()}, jax {jax.__version__}")
        if self.estimate is not None:
            self.console.print(f"step    {utilization.summary(self.estimate)}")
        self.console.print(f"folder  {self.config.out}" + (f", resumed after step {first}" if first else ""))
        for step, reason in self.corrupted.items():
            self.console.print(
                f"corrupted checkpoint of step {step}, moved to {run_folder.CHECKPOINTS_BEFORE}: {reason}"
            )

    def _open_metrics(self, first: int) -> metrics.MetricsFile:
        if not _is_process_0():
            return metrics.MetricsFile(path=None)
        return metrics.resume(self.config.out, step=first) if first else metrics.start(self.config.out)

    def _loop(self, state: TrainState, first: int) -> tuple[TrainState, int]:
        """Run the steps after `first` until the last or a stop request; the state and the number of steps taken."""
        step, batch = first, self._batch(first)
        while step < self.recipe.steps and not self.stop.should_stop(step):
            started = time.monotonic()
            state, measured = self.jitted.train_step(state, batch)
            # Load the next batch while the devices compute this step.
            used, batch = batch, self._batch(step + 1)
            values = {name: float(value) for name, value in jax.device_get(measured).items()}
            step += 1
            heartbeat.report_step(step)
            if np.isfinite(values["loss"]) and np.isfinite(values["gradient_norm"]):
                self.skipped = 0
                self._log(step, values, time.monotonic() - started)
            else:
                self._skip(step, values, state, used)
            if _due(step, self.recipe.eval_every) or step == self.recipe.steps:
                self._evaluate(state, step)
            if _due(step, self.recipe.checkpoint_every) and step < self.recipe.steps:
                self._save(state, step)
                heartbeat.report_working()
        heartbeat.report_finished()
        return state, step

    def _batch(self, step: int) -> Batch:
        return self.jitted.put(self.source.train_batch(step, self.rows))

    def _skip(self, step: int, values: dict[str, float], state: TrainState, batch: Batch) -> None:
        """Report a non-finite step, whose state is that before the step; raise an error unless it may be skipped."""
        self.skipped += 1
        found = [
            f"loss {values['loss']:g}, gradient norm {values['gradient_norm']:g}",
            f"batch {step - 1} of seed {self.config.seed}",
            *(f"first {origin}" for origin in self.jitted.origins(state, batch)),
        ]
        if self.config.nonfinite == "stop" or self.skipped > MAX_SKIPPED:
            raise ShardingError(
                f"step {step}" + (f", non-finite step {self.skipped} in a row" if self.skipped > 1 else ""),
                found=found,
                required="a finite loss and gradient",
                fix=["a lower --lr", "a longer --warmup", "--nonfinite skip"],
            )
        self.console.print(f"skipped step {step}: {'; '.join(found)}")
        self.metrics.log(step, {"skipped": self.skipped})

    def _log(self, step: int, values: dict[str, float], seconds: float) -> None:
        values[self.workload.throughput_name] = self.recipe.batch * self.workload.items_per_example / seconds
        values["seconds"] = seconds
        values["memory_bytes"] = metrics.memory_bytes()
        if self.estimate is not None:
            values["mfu"] = self.estimate.seconds_at_peak / seconds
        self.metrics.log(step, values)
        self.console.step(step, values)

    def _evaluate(self, state: TrainState, step: int) -> None:
        values = self.jitted.heldout(state, self.heldout_batches)
        self.heldout = step, values
        self.metrics.log(step, values)
        self.console.heldout(step, values)

    def _save(self, state: TrainState, step: int) -> None:
        heldout = self.heldout[1] if self.heldout and self.heldout[0] == step else {}
        progress = {"step": step, "examples": step * self.recipe.batch, "heldout": heldout}
        figure = heldout.get(self.workload.heldout[0].name)
        self.saver.save(step, state, self.settings | {run_folder.PROGRESS: progress}, figure=figure)

    def _conclude(self, state: TrainState) -> None:
        """Write loss curve and report, and print a summary."""
        sample = self._sample(state) if self.recipe.sample else ""
        if not _is_process_0():
            return
        heldout = {metric.name: self.metrics.series(metric.name)[-1][1] for metric in self.workload.heldout}
        curve = self._curve()
        (self.config.out / run_folder.CURVE).write_text(curve)
        run_report.write(
            self.config.out,
            settings=self.settings,
            facts=self._facts(heldout),
            curve=curve,
            completion=self.jitted.completion,
            sample=sample,
            plan=self.jitted.plan,
        )
        if sample:
            self.console.print(f"\nsample\n{sample}\n")
        self.console.print(f"held out  {self.workload.format_heldout(heldout, lambda metric: metric.final_digits)}")
        self.console.print(f"report    {self.config.out / run_report.FILE_NAME}, {run_report.PLAN_NAME}")

    def _curve(self) -> str:
        loss, heldout = self.workload.loss, self.workload.heldout[0]
        return loss_plot.svg(
            [(step, value * loss.scale) for step, value in self.metrics.series(loss.name)],
            [(step, value * heldout.scale) for step, value in self.metrics.series(heldout.name)],
            title=f"{self.workload.name} on {device_setup.format_axes(self.axes)}",
            unit=loss.unit,
        )

    def _facts(self, heldout: dict[str, float]) -> dict[str, str]:
        seconds = [value for _, value in self.metrics.series("seconds")]
        return {
            "held out": self.workload.format_heldout(heldout, lambda metric: 4),
            self.source.name: self.source.description,
            f"{self.source.name} sha256": self.source.sha256,
            "mesh": self._mesh_text(),
            "steps": f"{self.recipe.steps} of {self.workload.format_batch(self.recipe.batch)}",
            "step time": f"median {1e3 * float(np.median(seconds)):.0f} ms, total {sum(seconds):.0f} s",
            "process memory": f"{metrics.memory_bytes() / 1e6:,.0f} MB",
            "jax": jax.__version__,
        }

    def _mesh_text(self) -> str:
        several = f" of {processes.count()} processes" if processes.count() > 1 else ""
        axes = device_setup.format_axes(self.axes)
        return f"{axes} on {self.jitted.mesh.size} {jax.default_backend()} devices{several}"

    def _sample(self, state: TrainState) -> str:
        # One prompt per batch shard; the first one's text is shown.
        return self.jitted.sample(state, seed=self.config.seed)


def _is_process_0() -> bool:
    return processes.index() == 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
