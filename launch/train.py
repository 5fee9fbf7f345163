"""`sharding train`: complete the train step over the mesh, run it, and keep what came of it.

The completion comes first: it says how every array of the state is split, and the initial state is made in those parts.
A run that is stopped, by Ctrl-C, SIGTERM or a crash, goes on with `--resume` from its newest checkpoint, also on
another mesh.
"""

import time
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

import sharding
from sharding import ShardingError, checkpoint

from . import corpus, curve, devices, folder, metrics, report
from . import program as programs
from . import task as tasks
from .config import Train, as_json, batch_parts, parse_mesh
from .console import Console
from .interrupt import Interrupt

NUM_HELDOUT_TOKENS = 2**15
"""Looked at by every evaluation, always the same ones."""


def run(config: Train) -> None:
    """Train as `config` says, and leave metrics, checkpoints, curve and report in its folder."""
    model = tasks.model_config(config.model)
    axes = devices.start(parse_mesh(config.mesh), num_devices=config.devices, batch_size=config.batch)
    folder.make(config.out)
    text = corpus.read()
    task = tasks.build(model, config.optimization, steps=config.steps, seed=config.seed, sample=config.sample)
    settings = as_json(config) | {"model_config": as_json(model), "corpus_sha256": text.sha256}
    if config.resume:
        folder.check_resumable(config.out, settings)
    else:
        folder.set_aside(config.out)
    needed = jax.devices()[: batch_parts(axes) * axes.get("tensor", 1)]
    with sharding.mesh(axes, devices=needed) as mesh:
        assert isinstance(mesh, jax.sharding.Mesh)
        session = _Session(
            config=config,
            settings=settings,
            text=text,
            axes=axes,
            program=programs.over(task, mesh, batch_size=config.batch),
        )
        session.run()


class _Session:
    """One run of the loop: what stays the same through it, and the files that it writes."""

    def __init__(
        self,
        *,
        config: Train,
        settings: dict[str, Any],
        text: corpus.Corpus,
        axes: devices.Axes,
        program: programs.Program,
    ):
        self.config, self.settings, self.text, self.axes, self.program = config, settings, text, axes, program
        self.length = program.task.model.context
        self.checkpoints = config.out / folder.CHECKPOINTS
        self.saving: checkpoint.Saving | None = None
        num_batches = max(1, NUM_HELDOUT_TOKENS // (config.batch * self.length))
        self.heldout_tokens = corpus.heldout_batches(
            text, batch_size=config.batch, length=self.length, num_batches=num_batches
        )

    def run(self) -> None:
        state, first = self._begin()
        self.console = Console(num_steps=self.config.steps, first_step=first)
        self._introduce(first)
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            self.metrics = stack.enter_context(self._open_metrics(first))
            with self.console:
                state, last = self._loop(state, first, interrupt)
            self._save(state, last)
            self._wait_for_checkpoint()
            if last < self.config.steps:
                self.console.say(f"stopped after step {last}; --resume goes on from there")
                return
            self._conclude(state)

    def _begin(self) -> tuple[tasks.TrainState, int]:
        """The state to start from and the number of steps it has taken."""
        if not self.config.resume:
            return self.program.initial_state(self.config.seed), 0
        state = checkpoint.restore(self.checkpoints, self.program.sharded_shapes())
        return state, int(state.step)

    def _introduce(self, first: int) -> None:
        model, mesh = self.program.task.model, devices.written(self.axes)
        num_params = sum(leaf.size for leaf in jax.tree.leaves(self.program.task.state_shapes.params))
        kind = f"{self.program.mesh.size} {jax.default_backend()} devices"
        self.console.say(f"corpus  {self.text}")
        self.console.say(f"model   {self.config.model.name}, {num_params:,} parameters, context {model.context}")
        self.console.say(f"mesh    {mesh} on {kind}, jax {jax.__version__}")
        self.console.say(f"folder  {self.config.out}" + (f", resumed after step {first}" if first else ""))

    def _open_metrics(self, first: int) -> metrics.MetricsFile:
        return metrics.resume(self.config.out, step=first) if first else metrics.start(self.config.out)

    def _loop(self, state: tasks.TrainState, first: int, interrupt: Interrupt) -> tuple[tasks.TrainState, int]:
        """Take the steps after `first` until the last one or an interrupt; the state and the number of steps taken."""
        step, tokens = first, self._tokens(first)
        while step < self.config.steps and not interrupt.asked:
            begun = time.monotonic()
            state, measured = self.program.train_step(state, tokens)
            # The next batch is made while the devices work on this one.
            tokens = self._tokens(step + 1)
            figures = {name: float(value) for name, value in jax.device_get(measured).items()}
            step += 1
            self._log(step, figures, time.monotonic() - begun)
            if _due(step, self.config.eval_every) or step == self.config.steps:
                self._evaluate(state, step)
            if _due(step, self.config.checkpoint_every) and step < self.config.steps:
                self._save(state, step)
        return state, step

    def _tokens(self, step: int) -> jax.Array:
        tokens = corpus.train_batch(
            self.text, batch_size=self.config.batch, length=self.length, seed=self.config.seed, step=step
        )
        return self.program.put(tokens)

    def _log(self, step: int, figures: dict[str, float], seconds: float) -> None:
        if not np.isfinite(figures["loss"]):
            raise ShardingError(
                f"step {step}",
                there=f"the loss is {figures['loss']}",
                must="the loss must stay finite",
                fix=["a lower --lr", "a longer --warmup"],
            )
        figures["tokens_per_second"] = self.config.batch * self.length / seconds
        figures["seconds"] = seconds
        figures["memory_bytes"] = metrics.memory_bytes()
        self.metrics.log(step, figures)
        self.console.step(step, figures)

    def _evaluate(self, state: tasks.TrainState, step: int) -> None:
        nats = [float(self.program.evaluate(state.params, self.program.put(rows))) for rows in self.heldout_tokens]
        bits = metrics.bits_per_byte(sum(nats) / len(nats))
        self.metrics.log(step, {"heldout_bits_per_byte": bits})
        self.console.heldout(step, bits)

    def _save(self, state: tasks.TrainState, step: int) -> None:
        # One at a time: the one before has usually long been written.
        self._wait_for_checkpoint()
        self.saving = checkpoint.save(self.checkpoints, step, state, self.settings)

    def _wait_for_checkpoint(self) -> None:
        if self.saving:
            self.saving.wait()
        self.saving = None

    def _conclude(self, state: tasks.TrainState) -> None:
        """Write curve and report, and say how it ended."""
        _, bits = self.metrics.series("heldout_bits_per_byte")[-1]
        sample = self._sample(state) if self.config.sample else ""
        picture = self._curve()
        (self.config.out / folder.CURVE).write_text(picture)
        facts = self._facts(bits)
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
        self.console.say(f"held out  {bits:.2f} bits per byte")
        self.console.say(f"report    {self.config.out / report.FILE_NAME}")

    def _curve(self) -> str:
        train = [(step, metrics.bits_per_byte(nats)) for step, nats in self.metrics.series("loss")]
        title = f"{self.config.model.name} on {devices.written(self.axes)}"
        return curve.svg(train, self.metrics.series("heldout_bits_per_byte"), title=title)

    def _facts(self, bits: float) -> dict[str, str]:
        seconds = [value for _, value in self.metrics.series("seconds")]
        return {
            "held out": f"{bits:.4f} bits per byte",
            "corpus": str(self.text),
            "corpus sha256": self.text.sha256,
            "mesh": f"{devices.written(self.axes)} on {self.program.mesh.size} {jax.default_backend()} devices",
            "steps": f"{self.config.steps} of {self.config.batch} x {self.length} tokens",
            "time in steps": f"{sum(seconds):.0f} s, {1e3 * float(np.median(seconds)):.0f} ms a step in the middle",
            "memory of the process": f"{metrics.memory_bytes() / 1e6:,.0f} MB",
            "jax": jax.__version__,
        }

    def _sample(self, state: tasks.TrainState) -> str:
        prompt = np.frombuffer(b"\0def ", np.uint8).astype(np.int32)
        # One prompt for each part of a batch; the first is shown.
        rows = np.tile(prompt, (batch_parts(self.axes), 1))
        tokens = self.program.generate(state.params, self.program.put(rows), jax.random.key(self.config.seed))
        text = bytes(np.asarray(tokens)[0, 1:].astype(np.uint8).tolist())
        return text.replace(b"\0", b"\n").decode(errors="replace")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
