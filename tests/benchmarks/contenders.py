"""Contenders that train the same GPT: ours, one device in its own process, and PyTorch in its own Python.

    python -m tests.benchmarks.contenders --steps 5    # one device alone, as the benchmarks start it

Contenders alternate, so that a slow phase of the machine affects all. Compared are median step times; a step is the
gradient of a batch and Adam's update. All must reproduce the losses of one device, or the run fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import sharding
from sharding.launch import train_step
from sharding.models import gpt

from . import command_line, gpt_workload
from .peers.environment import torch_python
from .ratios import Ratio, rounded
from .result_file import Row

DEVICES = 4
THREADS = "NPROC"
"""The environment variable for XLA:CPU's number of intra-op threads."""
WARM = 2
"""Warm-up steps, not timed."""
TOLERANCE = 1e-5
"""Relative tolerance of losses."""
PEERS = Path(__file__).parent / "peers"

Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""(state, tokens [B, S + 1]) -> (state, loss)."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The number of measurements, and the peer library."""

    rounds: int = 2
    steps: int = 5
    """Steps of each contender per round, after two warm-up steps."""
    peer: str = "~/.cache/sharding-peers"
    """Folder of PyTorch's environment; empty omits PyTorch."""

    def tokens(self) -> np.ndarray:
        """Tokens of all steps, [steps, B, S + 1]."""
        return gpt_workload.tokens(steps=WARM + self.rounds * self.steps)


@dataclass(kw_only=True)
class Contender:
    """A train step with its state, step times and losses."""

    name: str
    step: Step
    state: Any
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, tokens: Iterable[np.ndarray], *, timed: bool) -> None:
        """Runs one step per batch."""
        for batch in tokens:
            begin = time.perf_counter()
            self.state, loss = jax.block_until_ready(self.step(self.state, batch))
            if timed:
                self.seconds.append(time.perf_counter() - begin)
            self.losses.append(float(loss))


def updated(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    """Parameters and optimizer state after Adam's update."""
    updates, opt_state = gpt_workload.OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def value_and_grad(loss_of: Callable[[Any, jax.Array], jax.Array], parts: int) -> Callable[..., Any]:
    """params, tokens -> the mean loss and its gradient, accumulated over `parts` microbatches."""
    both = jax.value_and_grad(loss_of)
    if parts == 1:
        return both

    def part(params: Any, variables: Any, tokens: jax.Array, key: None) -> Any:
        loss, gradients = both(params, tokens)
        return (loss, (variables, {})), gradients

    def over_parts(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        (loss, _), gradients = train_step.accumulate_gradients(part, parts)(params, nnx.State({}), tokens, None)
        return loss, gradients

    return over_parts


def gpt_step(config: gpt.Config = gpt_workload.CONFIG, *, parts: int = 1) -> tuple[Step, Any]:
    """A train step of a GPT, with the full batch or microbatches, and its initial state."""
    graph, params = nnx.split(gpt_workload.model(config), nnx.Param)
    both = value_and_grad(lambda p, tokens: gpt.next_token_loss(nnx.merge(graph, p), tokens), parts)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = both(params, tokens)
        return updated(params, opt_state, gradients), loss

    return step, (params, gpt_workload.OPTIMIZER.init(params))


def single(parts: int = 1) -> Contender:
    """One device, with the full batch or microbatches."""
    step, state = gpt_step(parts=parts)
    run = sharding.jit(step, donate_argnums=0)

    def once(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        with sharding.mesh(data=1):
            return run(state, tokens)

    name = "single" + (f", {parts} microbatches" if parts > 1 else "")
    return Contender(name=name, step=once, state=state)


def alternate(found: Sequence[Contender], tokens: np.ndarray, rounds: int) -> None:
    """Runs every contender over all tokens, alternating by rounds, after warm-up steps."""
    for contender in found:
        contender.run(tokens[:WARM], timed=False)
    for part in np.array_split(tokens[WARM:], rounds):
        for contender in found:
            contender.run(part, timed=True)


@dataclass(frozen=True, kw_only=True)
class Times:
    """The step times of a contender, in seconds."""

    name: str
    """`ours` or `PyTorch`, then what it runs."""
    num_devices: int
    num_processes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median step time."""
        return statistics.median(self.seconds)

    def as_row(self) -> Row:
        """The row of a result file."""
        low, median, high, worst = (rounded(x) for x in np.quantile(self.seconds, (0.25, 0.5, 0.75, 1)))
        counts = {"num_devices": self.num_devices, "num_processes": self.num_processes}
        times = {"median_seconds": median, "low_seconds": low, "high_seconds": high, "worst_seconds": worst}
        return {"kind": "step time", "name": self.name, **counts, **times}


def seconds(
    options: Rounds, ours: Callable[[], Sequence[Contender]], script: str, *, parts: Sequence[int] = (1,)
) -> dict[str, Times]:
    """Contender -> its step times, fastest first.

    Args:
        options: the number of rounds and steps, and the peer.
        ours: runs our contenders over the tokens of all rounds.
        script: the script under `peers` to run in PyTorch's environment.
        parts: numbers of microbatches for one device, one contender each.
    """
    python = torch_python(Path(options.peer).expanduser()) if options.peer else None
    devices = [_one_device(options.steps, count) for count in parts]
    peers = [_torch(python, script, options.steps)] if python else []
    found: dict[str, Times] = {}
    losses: dict[str, list[float]] = {}

    def add(name: str, seconds: Sequence[float], *, num_devices: int, num_processes: int) -> None:
        times = Times(name=name, num_devices=num_devices, num_processes=num_processes)
        found.setdefault(name, times).seconds.extend(seconds)

    for each in ours():
        add(f"ours, {each.name}", each.seconds, num_devices=DEVICES, num_processes=1)
        losses[f"ours, {each.name}"] = each.losses
    devices += [_one_device(options.steps, count) for _ in range(1, options.rounds) for count in parts]
    peers += [_torch(python, script, options.steps) for _ in range(1, options.rounds)] if python else []
    for each in devices:
        add(f"ours, {each['name']}", each["seconds"], num_devices=1, num_processes=1)
    for line in (line for each in peers for line in each):
        name = f"PyTorch, {line['name']}" + (", compiled" if line["compiled"] else "")
        count = line["processes"]
        add(name, line["step_seconds"][WARM:], num_devices=count, num_processes=count)
        losses[name] = line["losses"]
    expected = devices[0]["losses"]
    for name, values in losses.items():
        np.testing.assert_allclose(values[: len(expected)], expected[: len(values)], rtol=TOLERANCE, err_msg=name)
    return {times.name: times for times in sorted(found.values(), key=lambda times: times.median)}


def ratio_row(name: str, ours: Times, other: Times) -> Row:
    """The row of a ratio of step times, each of ours over each of the other's."""
    ratio = Ratio.of_all(ours.seconds, other.seconds)
    return {"kind": "ratio", "name": name, "ours": ours.name, "other": other.name, **ratio.as_row()}


def _one_device(steps: int, parts: int) -> dict[str, Any]:
    """Measures one device in its own process, with as many threads as cores."""
    command = [sys.executable, "-m", "tests.benchmarks.contenders", "--steps", str(steps), "--parts", str(parts)]
    env = {name: value for name, value in os.environ.items() if name != THREADS}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(ran.stdout.splitlines()[-1])


def _torch(python: Path, script: str, steps: int) -> list[dict[str, Any]]:
    """Measures PyTorch, eager and compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt.npz"
        gpt_workload.export(file, steps=WARM + steps)
        found = []
        for more in ([], ["--compile"]):
            command = [python, PEERS / script, file, "--warmup", str(WARM), *more]
            ran = subprocess.run(command, capture_output=True, text=True)
            found += [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            if ran.returncode:
                print(f"PyTorch {' '.join(more)}: {ran.stderr.strip().splitlines()[-1]}")
    return found


def start(devices: int = DEVICES) -> None:
    """Configures CPU devices of one thread each; call before any other use of JAX."""
    os.environ[THREADS] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


@dataclass(frozen=True)
class Alone:
    """One device alone."""

    steps: int = 5
    parts: int = 1
    """Number of microbatches."""


def _alone(options: Alone) -> None:
    """Runs one device and prints its step times and losses."""
    jax.config.update("jax_platforms", "cpu")
    contender = single(options.parts)
    alternate([contender], gpt_workload.tokens(steps=WARM + options.steps), 1)
    print(json.dumps({"name": contender.name, "seconds": contender.seconds, "losses": contender.losses}))


if __name__ == "__main__":
    command_line.run(_alone, Alone, __doc__)
