"""What a run says while it goes on: a bar that is redrawn on a terminal, plain lines now and then elsewhere."""

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import metrics
from .task import Task

NUM_PLAIN_LINES = 20
"""About so many lines a run writes where there is no terminal."""


@dataclass(kw_only=True)
class Console:
    """Shows the progress of `num_steps` steps of a task."""

    task: Task
    num_steps: int
    first_step: int = 0
    quiet: bool = False
    """Whether another process says it."""
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
                TextColumn("left"),
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

    def say(self, text: str) -> None:
        """Write lines of text as they are."""
        self.rich.print(text, markup=False)
        sys.stdout.flush()

    def heldout(self, step: int, figures: metrics.Figures) -> None:
        """Show the newest held-out figures."""
        first = self.task.heldout[0]
        self._heldout = f"  held out {first.number(figures[first.name])}"
        if not self._progress:
            self.say(f"step {step}/{self.num_steps}  held out {self.task.written_heldout(figures)}")

    def step(self, step: int, figures: metrics.Figures) -> None:
        """Show the figures of a finished step."""
        text = self._written(figures)
        if step == self.first_step + 1:
            # The first step compiles: what is left is told from the second one on.
            self._started = time.monotonic()
        if self._progress:
            self._progress.update(self._bar, completed=step, description=text + self._heldout)
        elif step % max(1, self.num_steps // NUM_PLAIN_LINES) == 0 or step == self.first_step + 1:
            self.say(f"step {step}/{self.num_steps}  {text}{self._left(step)}")

    def _left(self, step: int) -> str:
        done = step - self.first_step - 1
        if not done:
            return ""
        seconds = (time.monotonic() - self._started) / done * (self.num_steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"  left {minutes}:{seconds:02d}"

    def _written(self, figures: metrics.Figures) -> str:
        return (
            f"loss {self.task.loss.written(figures['loss'])}  {figures[self.task.rate]:,.0f} {self.task.item}/s  "
            f"{figures['memory_bytes'] / 1e6:,.0f} MB"
        )
