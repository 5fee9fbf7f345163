"""What trains the same GPT in a benchmark: ours in turns, one device in a process of its own, PyTorch in its Python.

    python -m tests.benchmarks.contenders --steps 5    # one device alone, as the benchmarks start it

Contenders take turns, so that a slow while of the machine is one of all. What is compared is the median of each one's
steps; a step is the gradient of a batch and Adam's update. All must give the losses of one device, or the run fails.
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

from sharding.launch import training
from sharding.models import gpt

from . import workload
from .peers.environment import torch_python

DEVICES = 4
THREADS = "NPROC"
"""The variable by which XLA:CPU is told how many threads share a device's work."""
WARM = 2
"""Steps before those that are timed."""
TOLERANCE = 1e-5
"""How far losses may be apart, relative."""
PEERS = Path(__file__).parent / "peers"

Step = Callable[[Any, jax.Array], tuple[Any, jax.Array]]
"""(state, tokens [B, S + 1]) -> (state, loss)."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often to measure, and against whom."""

    rounds: int = 2
    steps: int = 5
    """Steps of each contender in a round; two before them warm up."""
    peer: str = "~/.cache/sharding-peers"
    """Folder for PyTorch's environment; empty leaves PyTorch out."""

    def tokens(self) -> np.ndarray:
        """Those of all steps, [steps, B, S + 1]."""
        return workload.tokens(steps=WARM + self.rounds * self.steps)


@dataclass(kw_only=True)
class Contender:
    """Something that trains, and how long its steps took."""

    name: str
    step: Step
    state: Any
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def run(self, tokens: Iterable[np.ndarray], *, timed: bool) -> None:
        """A step for each batch."""
        for batch in tokens:
            begin = time.perf_counter()
            self.state, loss = jax.block_until_ready(self.step(self.state, batch))
            if timed:
                self.seconds.append(time.perf_counter() - begin)
            self.losses.append(float(loss))


def updated(params: Any, opt_state: Any, gradients: Any) -> tuple[Any, Any]:
    """Parameters and state after Adam's update."""
    updates, opt_state = workload.OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def value_and_grad(loss_of: Callable[[Any, jax.Array], jax.Array], parts: int) -> Callable[..., Any]:
    """params, tokens -> the mean loss and its gradient, of so many microbatches one after the other."""
    both = jax.value_and_grad(loss_of)
    if parts == 1:
        return both

    def part(params: Any, variables: Any, tokens: jax.Array, key: None) -> Any:
        loss, gradients = both(params, tokens)
        return (loss, (variables, {})), gradients

    def over_parts(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        (loss, _), gradients = training.accumulated(part, parts)(params, nnx.State({}), tokens, None)
        return loss, gradients

    return over_parts


def single(parts: int = 1) -> Contender:
    """One device, the batch at once or in microbatches."""
    graph, params = nnx.split(workload.model(), nnx.Param)
    both = value_and_grad(lambda p, tokens: gpt.next_token_loss(nnx.merge(graph, p), tokens), parts)

    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, gradients = both(params, tokens)
        return updated(params, opt_state, gradients), loss

    state = params, workload.OPTIMIZER.init(params)
    name = "single" + (f", {parts} microbatches" if parts > 1 else "")
    return Contender(name=name, step=jax.jit(step, donate_argnums=0), state=state)


def in_turns(found: Sequence[Contender], tokens: np.ndarray, rounds: int) -> None:
    """Each through all tokens, the first to warm up."""
    for contender in found:
        contender.run(tokens[:WARM], timed=False)
    for part in np.array_split(tokens[WARM:], rounds):
        for contender in found:
            contender.run(part, timed=True)


def seconds(
    asked: Rounds, ours: Callable[[], Sequence[Contender]], script: str, *, parts: Sequence[int] = (1,)
) -> dict[str, list[float]]:
    """Contender -> how long each of its steps took.

    Args:
        asked: how often.
        ours: runs what is ours through the tokens, all rounds.
        script: what to run in PyTorch's environment, under `peers`.
        parts: into how many microbatches one device cuts the batch, each a contender.
    """
    python = torch_python(Path(asked.peer).expanduser()) if asked.peer else None
    devices = [_apart(asked.steps, count) for count in parts]
    peers = [_theirs(python, script, asked.steps)] if python else []
    found: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for each in ours():
        found[f"ours, {each.name}"], losses[f"ours, {each.name}"] = each.seconds, each.losses
    devices += [_apart(asked.steps, count) for _ in range(1, asked.rounds) for count in parts]
    peers += [_theirs(python, script, asked.steps) for _ in range(1, asked.rounds)] if python else []
    for each in devices:
        found.setdefault(f"ours, {each['name']}", []).extend(each["seconds"])
    for line in (line for each in peers for line in each):
        name = f"PyTorch, {line['name']}" + (", compiled" if line["compiled"] else "")
        found.setdefault(name, []).extend(line["step_seconds"][WARM:])
        losses[name] = line["losses"]
    wanted = devices[0]["losses"]
    for name, values in losses.items():
        np.testing.assert_allclose(values[: len(wanted)], wanted[: len(values)], rtol=TOLERANCE, err_msg=name)
    return found


def _apart(steps: int, parts: int) -> dict[str, Any]:
    """One device in a process of its own, with as many threads as there are cores."""
    command = [sys.executable, "-m", "tests.benchmarks.contenders", "--steps", str(steps), "--parts", str(parts)]
    env = {name: value for name, value in os.environ.items() if name != THREADS}
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return json.loads(ran.stdout.splitlines()[-1])


def _theirs(python: Path, script: str, steps: int) -> list[dict[str, Any]]:
    """PyTorch's, as it is and compiled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt.npz"
        workload.export(file, steps=WARM + steps)
        found = []
        for more in ([], ["--compile"]):
            command = [python, PEERS / script, file, "--warmup", str(WARM), *more]
            ran = subprocess.run(command, capture_output=True, text=True)
            found += [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
            if ran.returncode:
                print(f"PyTorch {' '.join(more)}: {ran.stderr.strip().splitlines()[-1]}")
    return found


def medians(steps: dict[str, list[float]]) -> dict[str, float]:
    """Contender -> seconds of its middle step, the shortest first."""
    middle = {name: statistics.median(seconds) for name, seconds in steps.items()}
    return dict(sorted(middle.items(), key=lambda item: item[1]))


def machine() -> str:
    """What it ran on."""
    return f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}"


def rounded(values: dict[str, float], digits: int) -> dict[str, float]:
    """The same with so many digits that count."""
    return {name: float(f"{value:.{digits}g}") for name, value in values.items()}


def write(figures: dict[str, Any], path: Path | None) -> None:
    """Prints figures, and writes them where a path is given."""
    text = json.dumps(figures, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n")


def start(devices: int = DEVICES) -> None:
    """CPU devices of one thread each, before anything else is asked of JAX."""
    os.environ[THREADS] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _alone(steps: int = 5, parts: int = 1) -> None:
    """Prints the steps of one device."""
    jax.config.update("jax_platforms", "cpu")
    contender = single(parts)
    in_turns([contender], workload.tokens(steps=WARM + steps), 1)
    print(json.dumps({"name": contender.name, "seconds": contender.seconds, "losses": contender.losses}))


if __name__ == "__main__":
    tyro.cli(_alone)
