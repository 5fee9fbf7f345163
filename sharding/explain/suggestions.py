"""Suggestions: the single annotations that would save most, with the costs of the program that has them.

Each candidate (`candidate_annotations.py`) is propagated anew. Some are costed in full: those that settle a conflict,
those that move an annotation to other dims, and those that leave least work to a device. They are ranked by the product
of the ratios of their costs to the present ones, so that no unit counts for more than another. For the rank, time is
that of the chip's rates alone: fixed overheads per op and per collective dominate small programs, whatever their
shardings are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from ..cost import Topology
from ..display import Column, Table, Tabular
from ..display.units import bytes_text, seconds_text
from ..hardware import Platform
from ..paths.layers import merged_name
from ..propagation import Assignment
from ..spec import Dim, Spec, to_partition_spec
from .candidate_annotations import Candidate, candidates, local_bytes
from .memory_report import memory
from .program_costs import Costs, costs, lost_bytes
from .step_time import estimate

MAX_COSTED = 30
"""Candidates that are costed in full, in programs of up to `MANY_OPS` ops; in longer ones fewer, but at least 9."""
MANY_OPS = 2_000
LEAST_SAVED = 0.02
"""A suggestion's costs, multiplied, are lower than the present ones by at least this share."""
COLUMNS = (
    Column("annotate", "code"),
    Column("as", "code"),
    Column("instead of", "code"),
    Column("line", "code"),
    Column("sends", "bytes"),
    Column("sent now", "bytes"),
    Column("peak memory", "bytes"),
    Column("peak now", "bytes"),
    Column("step", "seconds"),
    Column("step now", "seconds"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """One annotation that saves, with the costs of the program that has it."""

    names: tuple[str, ...]
    """The values to annotate, equal layers together; as `Completion.annotate` takes them."""
    spec: P
    replaces: P | None
    """The annotation that they have now; None if they have none."""
    line: str
    """Where that annotation is, or else where the value is computed or, for an argument, first read."""
    before: Costs
    after: Costs
    complete: Callable[[], Any]
    """Returns the completion with the annotation; its ledger, memory and estimate are those of `after`."""

    @property
    def value(self) -> str:
        """The names as one, with `*` for the layers."""
        return merged_name(self.names)

    def __str__(self) -> str:
        instead = "" if self.replaces is None else f" instead of {self.replaces}"
        a, b = self.after, self.before
        time = f", {seconds_text(a.seconds)} instead of {seconds_text(b.seconds)} per step" if b.seconds else ""
        return (
            f"annotate {self.value} as {self.spec}{instead} ({self.line or 'unknown line'}): "
            f"sends {bytes_text(a.sent_bytes)} instead of {bytes_text(b.sent_bytes)}, "
            f"peak memory {bytes_text(a.peak_bytes)} instead of {bytes_text(b.peak_bytes)}{time}"
        )


class Suggestions(tuple[Suggestion, ...], Tabular):
    """The annotations that would save most, best first; each is for the program as it is, without the others."""

    idle_axes: tuple[str, ...]
    """The mesh axes that nothing in memory at the peak is sharded over."""
    peak_bytes: int
    """Peak memory of the program as it is."""

    def __new__(
        cls, found: Iterable[Suggestion] = (), *, idle_axes: Sequence[str] = (), peak_bytes: int = 0
    ) -> Suggestions:
        made = super().__new__(cls, found)
        made.idle_axes, made.peak_bytes = tuple(idle_axes), peak_bytes
        return made

    def tables(self) -> list[Table]:
        """One table."""
        rows = [
            (s.value, str(s.spec), "" if s.replaces is None else str(s.replaces), s.line)
            + (s.after.sent_bytes, s.before.sent_bytes, s.after.peak_bytes, s.before.peak_bytes)
            + (s.after.seconds, s.before.seconds)
            for s in self
        ]
        title = "annotations that would save most" if self else "no single annotation found that would save much"
        return [Table("; ".join([title, *self._notes()]), COLUMNS, rows)]

    def _notes(self) -> list[str]:
        return [
            f"axis {axis!r} splits none of the {bytes_text(self.peak_bytes)} at the peak" for axis in self.idle_axes
        ]

    def __str__(self) -> str:
        return "\n".join([*self._notes(), *map(str, self)] if self else [self.tables()[0].title])

    __repr__ = __str__


def suggestions(
    assignment: Assignment,
    complete: Callable[[Assignment], Any],
    on: Topology | None,
    donated: Collection[int],
    platform: Platform,
    *,
    limit: int,
) -> Suggestions:
    """The annotations that would save most.

    Args:
        assignment: of the program as it is.
        complete: makes the completion of another assignment.
        on: the mesh with its devices; None if they are unknown.
        donated: indices of the donated inputs of the graph.
        platform: whose compiler is modelled.
        limit: how many, at most.
    """

    def with_overheads(rates_only: Costs, of: Assignment) -> Costs:
        return rates_only if on is None else dataclasses.replace(rates_only, seconds=estimate(of, on).seconds)

    report = memory(assignment, donated=donated, platform=platform)
    costed = functools.partial(costs, on=on and _without_overheads(on), donated=donated, platform=platform)
    now = costed(assignment, report=report)
    work = local_bytes(assignment)
    ranked: list[tuple[float, Costs, Candidate]] = []
    for candidate, own in _worth_costing(assignment):
        after = costed(candidate.assignment)
        ratio = _product(after, now, own / work) ** candidate.likelihood
        ranked.append((ratio, after, candidate))
    best: list[tuple[Candidate, Costs]] = []
    seen = {now}
    for ratio, after, candidate in sorted(ranked, key=lambda one: one[0]):
        is_new = after not in seen and not any(candidate.is_alternative(other) for other, _ in best)
        if ratio <= 1 - LEAST_SAVED and len(best) < limit and is_new:
            best.append((candidate, after))
            seen.add(after)
    before = with_overheads(now, assignment)
    found = (
        Suggestion(
            names=candidate.target.names,
            spec=_spec(candidate.axes),
            replaces=None if candidate.target.annotated is None else _spec(candidate.target.annotated),
            line=candidate.target.source,
            before=before,
            after=with_overheads(after, candidate.assignment),
            complete=lambda of=candidate.assignment: complete(of),
        )
        for candidate, after in best
    )
    idle = [share.axis for share in report.by_axis.values() if share.num_devices > 1 and not share.split_bytes]
    return Suggestions(found, idle_axes=idle, peak_bytes=now.peak_bytes)


def _worth_costing(assignment: Assignment) -> list[tuple[Candidate, float]]:
    """Candidates with a device's work: those that move an annotation or settle a conflict, and those of least work."""
    found = [(candidate, local_bytes(candidate.assignment)) for candidate in candidates(assignment)]
    found.sort(key=lambda pair: pair[1])
    share = max(3, min(MAX_COSTED, MAX_COSTED * MANY_OPS // max(len(assignment.graph.ops), 1)) // 3)
    by_loss = sorted(found, key=lambda pair: lost_bytes(pair[0].assignment))
    settling = [pair for pair in by_loss if pair[0].settles][:share]
    moving = [pair for pair in by_loss if pair[0].moves][:share]
    rest = [pair for pair in found if pair not in settling and pair not in moving]
    return settling + moving + rest[: 3 * share - len(settling) - len(moving)]


def _product(after: Costs, before: Costs, work: float) -> float:
    """The ratios of costs, multiplied; the square root of those that other costs reflect, too.

    Args:
        work: ratio of a device's work, which stands for time where that is unknown.
    """
    least = before.peak_bytes / 10 + 1  # so that little more than nothing is not endlessly more
    sent = (after.sent_bytes + least) / (before.sent_bytes + least)
    lost = (after.lost_bytes + least) / (before.lost_bytes + least)
    time = after.seconds / before.seconds if before.seconds else work
    peak = (after.peak_bytes + 1) / (before.peak_bytes + 1)
    arguments = (after.argument_bytes + 1) / (before.argument_bytes + 1)
    return time * sent * peak * math.sqrt(arguments * lost)


def _without_overheads(on: Topology) -> Topology:
    devices = dataclasses.replace(on.devices, chip=on.devices.chip.without_overheads())
    return dataclasses.replace(on, devices=devices, _levels_cache={})


def _spec(axes: Iterable[Sequence[Any]]) -> P:
    return to_partition_spec(Spec(dims=tuple(Dim(axes=tuple(own)) for own in axes)))
