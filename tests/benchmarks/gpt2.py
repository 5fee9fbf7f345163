"""Training GPT-2 124M on one accelerator in bfloat16, beside PyTorch: tokens per second, and what was predicted.

    python -m tests.benchmarks.gpt2 --json gpt2.json
    python -m tests.benchmarks.gpt2 --smoke       # on a CPU: a tiny GPT and few steps, no times

Each contender is a process of its own: ours by kernels and by plain JAX, and PyTorch's `torch.compile`, in this Python
or another one (`--peer`), with the same weights, tokens and Adam. A step is the gradient of a batch and the update.
Reported are its time, that over PyTorch's, and for ours the estimate of `completion.estimate()` and the peak memory:
predicted, compiled, and of the device. All losses must agree, or the run fails.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from sharding.launch import utilization
from sharding.models import gpt

from . import command_line, gpt_workload
from .contenders import PEERS, gpt_step
from .ratios import Ratio, rounded
from .result_file import Row, measured

TOLERANCE = 5e-3
"""Relative, of losses after some steps in bfloat16."""
WARM, RUN = 5, 10
"""Warm-up steps, and steps that are timed together."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to train."""

    smoke: bool = False
    """A tiny GPT, to see that the command works."""
    batch: int = 16
    """Sequences of 1,024 tokens."""
    runs: int = 5
    """Timed runs of 10 steps each."""
    kernels: tuple[str, ...] = ("auto", "xla")
    """`Config.kernels` of our contenders."""
    peer: str = sys.executable
    """The Python with PyTorch; left out if it has none."""
    alone: str = ""
    """Runs one of ours in this process, and prints its figures as JSON."""
    json: Path | None = None
    """Output file of the figures."""

    @property
    def config(self) -> gpt.Config:
        """The model."""
        return gpt.PRESETS["gpt-tiny" if self.smoke else "gpt-small"]

    @property
    def steps(self) -> int:
        """Steps of each contender."""
        return WARM + self.runs * RUN


def main(options: Options) -> None:
    """Trains all contenders and prints a table."""
    share_memory()
    if options.alone:
        print(json.dumps(trained(options, options.alone)))
        return
    rows = list(contenders(options))
    if options.json is not None:
        measured("gpt2", options, rows, num_devices=1).save(options.json)


def share_memory() -> None:
    """Leaves a GPU's memory to other processes; call before any other use of JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def contenders(options: Options) -> list[Row]:
    """The rows of all contenders, which are printed too."""
    found = {f"ours, kernels {one}": _ours(options, one) for one in options.kernels}
    if (peer := _torch(options)) is not None:
        found["PyTorch, compiled"] = peer
    expected = next(iter(found.values()))["losses"]
    rows = []
    for name, one in found.items():
        np.testing.assert_allclose(one["losses"], expected, rtol=TOLERANCE, err_msg=name)
        row: Row = {"kind": "training", "name": name}
        if not options.smoke:
            seconds = statistics.median(one["seconds"])
            tokens = options.batch * options.config.context
            row |= {"seconds": rounded(seconds), "tokens_per_second": rounded(tokens / seconds)}
            if peer is not None and one is not peer:
                row |= Ratio.of_all(one["seconds"], peer["seconds"]).as_row()
        row |= {key: value for key, value in one.items() if key not in ("seconds", "losses")}
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return rows


def trained(options: Options, choice: str) -> dict[str, Any]:
    """Times, losses and memory of ours, in this process."""
    config = replace(options.config, kernels=choice)
    step, state = gpt_step(config)
    with sharding.mesh(data=1, devices=jax.devices()[:1]) as mesh:
        jitted = sharding.jit(step, donate_argnums=0)
        tokens = gpt_workload.tokens(config, steps=options.steps, batch=options.batch)
        batches = list(map(jax.device_put, tokens))
        completion = jitted.complete(state, batches[0])
        begun = time.perf_counter()
        run = jitted.lower(state, batches[0]).compile()
        compile_seconds = time.perf_counter() - begun
        verification, estimate = completion.verify(run), utilization.estimate(completion, mesh)
        losses, seconds = [], []
        for start in [0, *range(WARM, options.steps, RUN)]:
            timed = batches[start : start + RUN] if start else batches[:WARM]
            begun = time.perf_counter()
            for batch in timed:
                state, loss = run(state, batch)
                losses.append(loss)
            jax.block_until_ready(losses[-1])
            seconds.append((time.perf_counter() - begun) / len(timed))
    return {
        "seconds": seconds[1:],
        "losses": list(map(float, losses)),
        "estimated_seconds": None if estimate is None else rounded(estimate.seconds),
        "predicted_peak_bytes": verification.predicted_peak_bytes,
        "compiled_peak_bytes": verification.compiled_peak_bytes,
        "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_seconds": None if options.smoke else rounded(compile_seconds),
    }


def _ours(options: Options, choice: str) -> dict[str, Any]:
    shape = ["--batch", str(options.batch), "--runs", str(options.runs), *["--smoke"] * options.smoke]
    command = [sys.executable, "-m", "tests.benchmarks.gpt2", *shape, "--alone", choice]
    return _last_line(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True))


def _torch(options: Options) -> dict[str, Any] | None:
    """PyTorch's figures, or None if it can't run here."""
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    needed = f"import torch; torch.zeros(1, device={device!r})"
    if (
        shutil.which(options.peer) is None
        or subprocess.run([options.peer, "-c", needed], capture_output=True).returncode
    ):
        print(f"PyTorch left out: {options.peer} has none for {device}")
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gpt.npz"
        gpt_workload.export(file, options.config, steps=options.steps, batch=options.batch)
        script = PEERS / "torch_accelerator.py"
        command = [options.peer, script, file, "--device", device, "--warmup", str(WARM), "--run", str(RUN)]
        return _last_line(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True))


def _last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
