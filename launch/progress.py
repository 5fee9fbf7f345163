"""Console output of a run: a progress bar on a terminal, a line every few steps elsewhere."""

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import metrics
from .workload import Workload

NUM_PLAIN_LINES = 20
"""Approximate number of progress lines of a run without a terminal."""


@dataclass(kw_only=True)
class Console:
    """Shows the progress of `num_steps` steps of a workload."""

    workload: Workload
    num_steps: int
    first_step: int = 0
    quiet: bool = False
    """Print nothing, in processes other than process 0."""
    rich: RichConsole = field(default_factory=lambda: RichConsole(highlight=False, soft_wrap=True))

    def __post_init__(self) -> None:
        self.rich.quiet |= self.quiet
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._heldout = ""
        if self.rich.is_terminal and not self.quiet:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.rich,
            )
            self._bar = self._progress.add_task("", total=self.num_steps, completed=self.first_step)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def print(self, text: str) -> None:
        """Print lines of text without markup."""
        self.rich.print(text, markup=False)
        sys.stdout.flush()

    def heldout(self, step: int, values: metrics.MetricValues) -> None:
        """Show the newest held-out metrics."""
        first = self.workload.heldout[0]
        self._heldout = f"  held out {first.number(values[first.name])}"
        if not self._progress:
            self.print(f"step {step}/{self.num_steps}  held out {self.workload.format_heldout(values)}")

    def step(self, step: int, values: metrics.MetricValues) -> None:
        """Show the metrics of a finished step."""
        text = self._format(values)
        if step == self.first_step + 1:
            # The first step compiles: estimate the remaining time from the second one on.
            self._started = time.monotonic()
        if self._progress:
            self._progress.update(self._bar, completed=step, description=text + self._heldout)
        elif step % max(1, self.num_steps // NUM_PLAIN_LINES) == 0 or step == self.first_step + 1:
            self.print(f"step {step}/{self.num_steps}  {text}{self._eta(step)}")

    def _eta(self, step: int) -> str:
        done = step - self.first_step - 1
        if not done:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self.num_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"  ETA {minutes}:{seconds:02d}"

    def _format(self, values: metrics.MetricValues) -> str:
        return (
            f"loss {self.workload.loss.format(values['loss'])}  "
            f"{values[self.workload.throughput_name]:,.0f} {self.workload.item}/s  "
            f"{values['memory_bytes'] / 1e6:,.0f} MB" + (f"  MFU {values['mfu']:.1%}" if "mfu" in values else "")
        )
