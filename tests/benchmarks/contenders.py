"""Contenders that train the same GPT: ours, one device in its own process, and PyTorch in its own Python.

    python -m tests.benchmarks.contenders --steps 5    # one device alone, as the benchmarks start it

Contenders alternate, so that a slow phase of the machine affects all. Compared are median step times; a step is the
gradient of a batch and Adam's update. All must reproduce the losses of one device, or the run fails.
"""

from __future__ import annotations

import json
import os
import platform
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
import tyro
from flax import nnx

from sharding.launch import train_step
from sharding.models import gpt

from . import gpt_workload
from .peers.environment import torch_python

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


def single(parts: int = 1) -> Contender:
    """One device, with the full batch or microbatches."""
    graph, params = nnx.split(gpt_workload.model(), nnx.Param)
    both = value_and_grad(lambda p, tokens: gpt.next_token_loss(nnx.merge(graph, p), tokens), parts)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = both(params, tokens)
        return updated(params, opt_state, gradients), loss

    state = params, gpt_workload.OPTIMIZER.init(params)
    name = "single" + (f", {parts} microbatches" if parts > 1 else "")
    return Contender(name=name, step=jax.jit(step, donate_argnums=0), state=state)


def alternate(found: Sequence[Contender], tokens: np.ndarray, rounds: int) -> None:
    """Runs every contender over all tokens, alternating by rounds, after warm-up steps."""
    for contender in found:
        contender.run(tokens[:WARM], timed=False)
    for part in np.array_split(tokens[WARM:], rounds):
        for contender in found:
            contender.run(part, timed=True)


def seconds(
    options: Rounds, ours: Callable[[], Sequence[Contender]], script: str, *, parts: Sequence[int] = (1,)
) -> dict[str, list[float]]:
    """Contender -> the time of each of its steps.

    Args:
        options: the number of rounds and steps, and the peer.
        ours: runs our contenders over the tokens of all rounds.
        script: the script under `peers` to run in PyTorch's environment.
        parts: numbers of microbatches for one device, one contender each.
    """
    python = torch_python(Path(options.peer).expanduser()) if options.peer else None
    devices = [_one_device(options.steps, count) for count in parts]
    peers = [_torch(python, script, options.steps)] if python else []
    found: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for each in ours():
        found[f"ours, {each.name}"], losses[f"ours, {each.name}"] = each.seconds, each.losses
    devices += [_one_device(options.steps, count) for _ in range(1, options.rounds) for count in parts]
    peers += [_torch(python, script, options.steps) for _ in range(1, options.rounds)] if python else []
    for each in devices:
        found.setdefault(f"ours, {each['name']}", []).extend(each["seconds"])
    for line in (line for each in peers for line in each):
        name = f"PyTorch, {line['name']}" + (", compiled" if line["compiled"] else "")
        found.setdefault(name, []).extend(line["step_seconds"][WARM:])
        losses[name] = line["losses"]
    expected = devices[0]["losses"]
    for name, values in losses.items():
        np.testing.assert_allclose(values[: len(expected)], expected[: len(values)], rtol=TOLERANCE, err_msg=name)
    return found


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


def medians(steps: dict[str, list[float]]) -> dict[str, float]:
    """Contender -> median step time in seconds, fastest first."""
    middle = {name: statistics.median(seconds) for name, seconds in steps.items()}
    return dict(sorted(middle.items(), key=lambda item: item[1]))


def machine() -> str:
    """The processor, its cores and the JAX release."""
    return f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}"


def rounded(values: dict[str, float], digits: int) -> dict[str, float]:
    """The values rounded to `digits` significant digits."""
    return {name: float(f"{value:.{digits}g}") for name, value in values.items()}


def write(figures: dict[str, Any], path: Path | None) -> None:
    """Prints figures, and writes them to `path` if given."""
    text = json.dumps(figures, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def start(devices: int = DEVICES) -> None:
    """Configures CPU devices of one thread each; call before any other use of JAX."""
    os.environ[THREADS] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def num_cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alone(steps: int = 5, parts: int = 1) -> None:
    """Runs one device and prints its step times and losses."""
    jax.config.update("jax_platforms", "cpu")
    contender = single(parts)
    alternate([contender], gpt_workload.tokens(steps=WARM + steps), 1)
    print(json.dumps({"name": contender.name, "seconds": contender.seconds, "losses": contender.losses}))


if __name__ == "__main__":
    tyro.cli(_alone)
