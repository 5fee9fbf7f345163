"""Lock files: a program's shardings, collectives and peak memory, small enough to commit and to review as a diff."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ShardingError
from ..spec import sizes_text
from .collective_ledger import Ledger
from .memory_report import MemoryReport

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Mesh, specs, collectives and peak memory of one program."""

    mesh: Mapping[str, int]
    """Axis sizes, major axis first."""
    specs: Mapping[str, str]
    """Arguments, results and annotated values with their shapes -> spec; identical layers share a line."""
    collectives: Mapping[str, tuple[int, int]]
    """Kind -> (number per call, their bytes)."""
    peak_bytes: int
    """Per device."""

    @staticmethod
    def of(mesh: Mapping[str, int], rows: Iterable[tuple[str, str, str]], ledger: Ledger, report: MemoryReport) -> Lock:
        """The lock of a program; `rows` are (name, shape, spec) of its values."""
        return Lock(
            mesh=dict(mesh),
            specs={f"{name} {shape}": spec for name, shape, spec in rows},
            collectives={str(kind): found for kind, found in ledger.by_kind().items()},
            peak_bytes=report.peak_bytes,
        )

    def text(self) -> str:
        """JSON, byte-identical for the same program; names sorted, one per line."""
        document = {
            "version": VERSION,
            "mesh": dict(self.mesh),
            "peak_bytes": self.peak_bytes,
            "collectives": {k: {"count": n, "bytes": size} for k, (n, size) in sorted(self.collectives.items())},
            "specs": dict(sorted(self.specs.items())),
        }
        return json.dumps(document, indent=1) + "\n"

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Lock:
        """Reads a lock file.

        Raises:
            ShardingError: no such file, or not a lock file.
        """
        try:
            document = json.loads(Path(path).read_text())
            if document["version"] != VERSION:
                raise ValueError(f"version {document['version']}, not {VERSION}")
            found = document["collectives"]
            return Lock(
                mesh={str(k): int(n) for k, n in document["mesh"].items()},
                specs={str(k): str(v) for k, v in document["specs"].items()},
                collectives={str(k): (int(c["count"]), int(c["bytes"])) for k, c in found.items()},
                peak_bytes=int(document["peak_bytes"]),
            )
        except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardingError(
                f"the lock file {os.fspath(path)!r}",
                found=f"{type(error).__name__}: {error}",
                required="a file written by completion.lock(path)",
                fix=f"completion.lock({os.fspath(path)!r})",
            ) from error

    def diff(self, other: Lock) -> tuple[str, ...]:
        """The changes from this lock to another, one per line: `-` removed, `+` added, else `old -> new`."""
        lines: list[str] = []
        if list(self.mesh.items()) != list(other.mesh.items()):
            lines.append(f"mesh: {sizes_text(self.mesh)} -> {sizes_text(other.mesh)}")
        lines += _changes(self.specs, other.specs)
        old = {kind: f"{n} ({size} bytes)" for kind, (n, size) in self.collectives.items()}
        new = {kind: f"{n} ({size} bytes)" for kind, (n, size) in other.collectives.items()}
        lines += _changes(old, new)
        if self.peak_bytes != other.peak_bytes:
            lines.append(f"peak memory: {self.peak_bytes} -> {other.peak_bytes} bytes")
        return tuple(lines)


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> Sequence[str]:
    lines = []
    for key in sorted({*old, *new}):
        if key not in new:
            lines.append(f"- {key}: {old[key]}")
        elif key not in old:
            lines.append(f"+ {key}: {new[key]}")
        elif old[key] != new[key]:
            lines.append(f"{key}: {old[key]} -> {new[key]}")
    return lines
