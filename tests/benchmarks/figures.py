"""The README's table of measured figures and the Markdown tables beside the result files, from the result files.

    python -m tests.benchmarks.figures           # rewrites them
    python -m tests.benchmarks.figures --check   # fails if one differs from what the command would write

The README has a row for each result of a benchmark's newest JAX: the first line of the module's docstring, where it was
measured, and the module's `summary`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType

from . import (
    accelerator,
    axes,
    command_line,
    host_memory,
    iopddl,
    memory_budgets,
    pipeline,
    planned_gpt3,
    planning,
    prediction,
    propagation,
    ranking,
    rematerialization,
    reshards,
    result_file,
    sampled_plans,
    saving,
    scale,
    step,
    step_times,
)
from .result_file import FOLDER, Result

sys.path.insert(0, str(Path(__file__).parent.parent))  # as under pytest: `fuzz` is top-level

import fuzz.results

BENCHMARKS: dict[str, ModuleType] = {
    "prediction": prediction,
    "reshards": reshards,
    "rematerialization": rematerialization,
    "ranking": ranking,
    "step": step,
    "propagation": propagation,
    "scale": scale,
    "accelerator": accelerator,
    "step_times": step_times,
    "memory_budgets": memory_budgets,
    "planned_gpt3": planned_gpt3,
    "sampled_plans": sampled_plans,
    "pipeline": pipeline,
    "axes": axes,
    "saving": saving,
    "host_memory": host_memory,
    "planning": planning,
    "iopddl": iopddl,
    "fuzz": fuzz.results,
}
"""In the order of the README's table."""
README = FOLDER.parent.parent.parent / "README.md"
BEGIN, END = "<!-- python -m tests.benchmarks.figures writes from here -->\n", "<!-- to here -->\n"


@dataclass(frozen=True)
class Options:
    """Whether to write."""

    check: bool = False
    """Only compare."""


def results() -> dict[Path, Result]:
    """All result files, in the order of the README's table, the newest JAX first."""
    found = {path: result_file.load(path) for path in sorted(FOLDER.glob("*.json"))}
    order = list(BENCHMARKS)
    by_age = sorted(found.items(), key=lambda item: item[1].jax_release, reverse=True)
    return dict(sorted(by_age, key=lambda item: order.index(item[1].benchmark)))


def about(module: ModuleType) -> str:
    """What a benchmark measures, and against what."""
    return (module.__doc__ or "").partition("\n")[0].removesuffix(".")


def readme_rows() -> Iterator[str]:
    """The lines of the README's table."""
    yield "| `NAME`: what is measured | result | where |"
    yield "|---|---|---|"
    for name, group in groupby(results().values(), key=lambda result: result.benchmark):
        own, module = list(group), BENCHMARKS[name]
        newest = [result for result in own if result.jax_release == own[0].jax_release]
        for k, result in enumerate(newest):
            first = "" if k else f" `{name}`: {about(module)}"
            found = module.summary(result)
            if result.options.get("corpus"):
                found += f"; errors of predicted peaks that reports state: {prediction.stored_errors()}"
            yield f"|{first} | {found} | {result.where} |"


def readme() -> str:
    """The README with the table of the result files."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{README.name} has no table between the lines {BEGIN.strip()!r} and {END.strip()!r}.")
    return before + BEGIN + "".join(f"{line}\n" for line in readme_rows()) + END + after


def page(path: Path, result: Result) -> str:
    """The Markdown file of a result: all its rows."""
    module = BENCHMARKS[result.benchmark]
    head = [f"# {about(module)}", "", f"{result.where}: {module.summary(result)}.", ""]
    written = f"Written from `{path.name}` by `python -m tests.benchmarks.figures`"
    how = "by a command that was not recorded" if result.command is None else f"by `{result.command}`"
    return "\n".join([*head, f"{written}; measured {how}.", "", *module.table(result)]).rstrip() + "\n"


def texts() -> dict[Path, str]:
    """File -> what it must contain."""
    pages = {
        path.with_suffix(".md"): page(path, result)
        for path, result in results().items()
        if hasattr(BENCHMARKS[result.benchmark], "table")
    }
    return {README: readme(), **pages}


def stale() -> list[Path]:
    """Files that differ from what the command would write, and Markdown files that it would not write."""
    found = texts()
    wrong = [path for path, text in found.items() if not path.exists() or path.read_text() != text]
    return wrong + [path for path in FOLDER.glob("*.md") if path not in found]


def main(options: Options) -> None:
    """Writes the files, or lists those that differ."""
    if options.check:
        if names := [path.name for path in stale()]:
            sys.exit(f"{', '.join(names)}: not as the result files have it; run python -m tests.benchmarks.figures")
        return
    for path, text in texts().items():
        path.write_text(text)


if __name__ == "__main__":
    command_line.run(main, Options, __doc__)
