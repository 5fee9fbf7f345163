"""Result files: one JSON format for all benchmarks, without dates, so that equal figures are equal files.

Null means not recorded; texts made from a file say "unknown".
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import jax

FOLDER = Path(__file__).parent / "results"
Row = dict[str, Any]
"""The figures of one program, variant or ratio; `kind` tells rows apart where a benchmark has several kinds."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a benchmark found, where, and by which command."""

    benchmark: str
    """Module under `tests/benchmarks/`."""
    command: str | None
    """The command that measured, without its output files."""
    jax: str
    """Release; several are joined by " and "."""
    python: str | None
    platform: str
    """What ran the programs (cpu, gpu, tpu), or what compiled them ahead of time (h100, v5p)."""
    device: str | None
    """Name of the CPU, GPU or TPU."""
    num_devices: int | None
    """Devices of a mesh; virtual ones on CPUs."""
    num_processes: int | None
    """Processes of a program that is ours."""
    cores: int | None
    """CPU cores that were available."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Row] = ()

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of a kind."""
        return [row for row in self.rows if row.get("kind") == kind]

    def named(self, name: str, kind: str | None = None) -> Row:
        """The row of a name, of one kind or the only one; fails if there is none."""
        (found,) = (row for row in self.rows if row.get("name") == name and (kind is None or row.get("kind") == kind))
        return found

    @property
    def where(self) -> str:
        """JAX, devices and machine in a few words."""
        is_aot = self.platform not in ("cpu", "gpu", "tpu")
        parts = [f"JAX {self.jax}", self.platform + " ahead of time" * is_aot]
        parts += [_count(self.num_devices, "device"), _count(self.num_processes, "process", "processes")]
        if self.device is None and self.cores is None:
            return ", ".join([*parts, *([] if is_aot else ["machine unknown"])])
        return ", ".join([*parts, self.device or "CPU unknown", _count(self.cores, "core")])

    @property
    def jax_release(self) -> tuple[int, ...]:
        """The release of JAX to compare, the newest if there are several."""
        return max(tuple(map(int, text.split("."))) for text in self.jax.split(" and "))

    def save(self, path: Path) -> None:
        """Writes the file."""
        path.write_text(json.dumps(asdict(self), indent=1, default=float) + "\n")


def load(path: Path) -> Result:
    """Reads a file."""
    return Result(**json.loads(path.read_text()))


def measured(
    benchmark: str,
    options: Any,
    rows: Iterable[Any],
    *,
    num_devices: int | None = None,
    platform_name: str | None = None,
) -> Result:
    """The result of this process.

    Args:
        benchmark: module under `tests/benchmarks/`.
        options: a dataclass; output files are left out.
        rows: dataclasses or dicts.
        num_devices: of the meshes; by default all of the process.
        platform_name: the compiler, if programs are compiled ahead of time; by default that of the devices.
    """
    chosen = {name: value for name, value in asdict(options).items() if f"--{name}" not in FILE_OPTIONS}
    return Result(
        benchmark=benchmark,
        command=command(),
        jax=jax.__version__,
        python=platform.python_version(),
        platform=platform_name or jax.default_backend(),
        device=device_name(),
        num_devices=num_devices or len(jax.devices()),
        num_processes=jax.process_count(),
        cores=num_cores(),
        options=chosen,
        rows=[asdict(row) if is_dataclass(row) and not isinstance(row, type) else dict(row) for row in rows],
    )


FILE_OPTIONS = "--json", "--compiled", "--profile", "--calibration", "--measured"
"""Options of files, which are no part of what was measured."""


def command() -> str:
    """The command line of this process, without files that it writes, or reads earlier figures from."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    script = Path(sys.argv[0]).resolve()
    root = FOLDER.parent.parent.parent
    program = f"-m {spec.name}" if spec else str(script.relative_to(root) if script.is_relative_to(root) else script)
    kept = [text for text in sys.argv[1:] if not text.startswith(tuple(f"{option}=" for option in FILE_OPTIONS))]
    for option in FILE_OPTIONS:
        while option in kept:
            at = kept.index(option)
            del kept[at : at + 2]
    return " ".join(["python", program.removesuffix(".__main__"), *map(shlex.quote, kept)])


def file_name(text: str) -> str:
    """A name or title in names of files."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def device_name() -> str | None:
    """The name of the accelerator, or of the CPU as its maker calls it; its architecture where that is unknown."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in names if name and name != "unknown"), platform.machine() or None)


def num_cores() -> int:
    """Cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(number: int | None, one: str, several: str = "") -> str:
    word = one if number == 1 else several or f"{one}s"
    return f"{'unknown' if number is None else number} {word}"
