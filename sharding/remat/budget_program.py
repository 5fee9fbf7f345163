"""`AutoProgram`: a step with blocks under `remat.auto`, predicted for each choice of what they keep."""

from __future__ import annotations

import difflib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..completion import Completion
from ..cost.flops import MATMULS
from ..errors import ShardingError
from ..explain import Estimate
from ..graph import Graph, Op
from ..hardware import Chip, Devices, Platform
from .auto_policy import Choice, Group, Recorder, chosen
from .budget_search import Cost, Options, Search
from .compiled_peaks import CompiledPeaks
from .linearized_program import Key, key_of
from .policy import EVERYTHING, SCAN, Policy, label

KEEP, OFFLOAD, RECOMPUTE = "keep", "offload", "recompute"
TYPICAL = {"tpu": "v5p", "gpu": "h100", "cpu": "cpu"}
"""Platform -> the chip by which programs are compared where the mesh's devices are unknown."""
MOVES = frozenset({"annotate", "copy", "reshape", "squeeze", "transpose"})
"""Ops whose results are their operands, moved."""
Hardware = Devices | Chip | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value that is kept, offloaded or computed again."""

    name: str
    """Given by `checkpoint_name`, or the op and its operands."""
    action: str
    """`keep`, `offload`, `recompute`, or the snapshots of a scan; where groups differ, each with how many do so."""
    num_bytes: int
    """Of all its arrays on one device."""
    flops: float
    """Of the products that run again if it alone is computed again."""
    source: str
    """The user's line."""


@dataclass(slots=True, eq=False, kw_only=True)
class AutoProgram:
    """A step under choices."""

    step: Any
    trial: Any
    """The step, with a cache of its own."""
    args: Sequence[Any]
    hardware: Hardware
    keys: dict[Key, list[Group]]
    """The values to decide on, and the groups that have them."""
    groups: list[Group]
    chip: str
    """The chip, or devices, of the predicted times."""
    platform: Platform
    """Whose memory is predicted."""
    host_memory_bytes: float
    """Limit of the host's memory per device, for what is offloaded."""
    own_host_bytes: int
    """Of the program with nothing offloaded, such as its arguments there."""
    search: Search = field(init=False)
    mixed: dict[Choice, Cost] = field(default_factory=dict)
    """Choices that treat the groups differently."""
    compiled: CompiledPeaks = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = CompiledPeaks(self.step, self.args)
        limit = self.own_host_bytes + self.host_memory_bytes
        decisions = [self.options_of(key) for key in self.keys]
        self.search = Search(decisions, lambda options: self.price(self.choice(options)), limit)

    @classmethod
    def of(
        cls,
        step: Any,
        args: Sequence[Any],
        *,
        names: Sequence[str] | None,
        host_memory_bytes: float | None,
        hardware: Hardware,
    ) -> AutoProgram:
        """The program of a step, with the values that JAX asks `remat.auto` about.

        Raises:
            ShardingError: there are none, or not these names.
        """
        trial = step.with_empty_cache()
        completion, recorder = recorded(trial, args)
        if not recorder.asked:
            raise ShardingError(
                f"remat.fit({completion.name})",
                found="no derivative of a block with policy=remat.auto, or of a scan with schedule=remat.auto",
                required="blocks or scans whose recomputation is to be chosen",
                fix=["jax.checkpoint(block, policy=remat.auto)", "remat.scan(..., schedule=remat.auto)"],
            )
        aliases = _aliases(completion.assignment.graph)
        keys: dict[Key, list[Group]] = {}
        for group, asked in recorder.asked.items():
            for key in asked:
                if key[0] in ("name", SCAN) or (key[0] in MATMULS and names is None and key not in aliases):
                    keys.setdefault(key, []).append(group)
        hardware = _known(completion) if hardware is None else hardware
        time = completion.estimate(hardware)
        host_limit = time.host_memory_bytes if host_memory_bytes is None else host_memory_bytes
        return cls(
            step=step,
            trial=trial,
            args=args,
            hardware=hardware,
            keys=keys if names is None else _named(names, keys),
            groups=list(recorder.asked),
            chip=time.chip,
            platform=completion.memory().platform,
            host_memory_bytes=host_limit,
            own_host_bytes=completion.memory().host.total_bytes,
        )

    def options_of(self, key: Key) -> Options:
        """What can be done to a value, or how many snapshots a scan can hold; most memory first."""
        if key[0] == SCAN:
            counts = itertools.takewhile(bool, (key[1] >> k for k in itertools.count(1)))
            return (KEEP, *counts) if key[1] > 1 else (KEEP, 1)
        return (KEEP, OFFLOAD, RECOMPUTE) if self.host_memory_bytes else (KEEP, RECOMPUTE)

    def tradeoffs(self) -> list[tuple[Options, Cost]]:
        """The best programs, least memory first; one of those that were tried keeps everything."""
        self.search.cost((EVERYTHING,) * max(1, len(self.keys)))
        return self.search.run()

    def within(self, found: Sequence[tuple[Options, Cost]], memory_bytes: float) -> Iterator[tuple[Choice, Cost]]:
        """The choices whose predicted peaks are within a limit, fastest first, and that of least memory in any case.

        From the fastest such trade-off down, each after the choices between it and the next faster one. A larger limit
        has all choices of a smaller one, so that the first one that some condition accepts gets no slower.
        """
        last = max((k for k, (_, cost) in enumerate(found) if cost.peak_bytes <= memory_bytes), default=0)
        for place in range(last, -1, -1):
            options, cost = found[place]
            yield from (one for one in self._between(*found[place : place + 2]) if one[1].peak_bytes <= memory_bytes)
            yield self.choice(options), cost

    def _between(self, slower: tuple[Options, Cost], *faster: tuple[Options, Cost]) -> list[tuple[Choice, Cost]]:
        """The choices in which the first groups follow the next faster trade-off and the others this one, fastest
        first; only those that are faster than this one and no faster than the other."""
        found = []
        for options, cost in faster:
            for share in range(1, len(self.groups)):
                mixed = self.choice(slower[0], options, share)
                own = self.mixed[mixed] = self.mixed[mixed] if mixed in self.mixed else self.price(mixed)
                if cost.seconds <= own.seconds < slower[1].seconds:
                    found.append((mixed, own))
        return sorted(found, key=lambda one: (one[1].seconds, one[1].peak_bytes))

    @property
    def least(self) -> Cost:
        """With nothing kept."""
        return self.search.cost(tuple(options[-1] for options in self.search.decisions))

    def choice(self, options: Options, first: Options = (), share: int = 0) -> Choice:
        """The choice that treats the values of all groups so; the first groups, as many as `share`, otherwise."""
        each = [first] * share + [options] * (len(self.groups) - share)
        return Choice(tuple((group, self._policy(group, own)) for group, own in zip(self.groups, each, strict=True)))

    def _policy(self, group: Group, options: Options) -> Policy:
        if EVERYTHING in options:
            return Policy(frozenset([EVERYTHING]))
        own = [
            (key, action) for (key, groups), action in zip(self.keys.items(), options, strict=True) if group in groups
        ]
        saved, offloaded = (frozenset(key for key, action in own if action == one) for one in (KEEP, OFFLOAD))
        return Policy(saved, offloaded, tuple((key, action) for key, action in own if isinstance(action, int)))

    def completed(self, choice: Choice) -> Completion:
        """The program under a choice."""
        with chosen(choice):
            completion = self.trial.complete(*self.args)
        self.trial.clear_cache()
        return completion

    def price(self, choice: Choice) -> Cost:
        """What it takes."""
        completion = self.completed(choice)
        memory, time = completion.memory(), completion.estimate(self.hardware)
        return Cost(
            peak_bytes=memory.peak_bytes,
            seconds=time.seconds,
            flops=flops(time),
            host_bytes=memory.host.total_bytes,
        )

    def values(self, choice: Choice) -> Iterator[Value]:
        """The values, with what is done to them under a choice."""
        all_kept = (KEEP,) * len(self.keys)
        completion = self.completed(self.choice(all_kept))
        ops: dict[Key, list[Op]] = {key: [] for key in self.keys}
        for op in completion.assignment.graph.ops:
            if op.site and (own := _key(op)) in ops:
                ops[own].append(op)
        specs = completion.assignment.specs
        for place, (key, groups) in enumerate(self.keys.items()):
            without = (*all_kept[:place], self.search.decisions[place][-1], *all_kept[place + 1 :])
            yield Value(
                name=label(key),
                action=_action(key, [choice.of(group) for group in groups]),
                num_bytes=sum(op.times * completion.num_bytes(v, specs[v]) for op in ops[key] for v in op.results),
                flops=self.search.cost(without).flops - self.search.cost(all_kept).flops,
                source=next((op.source for op in ops[key] if op.source), ""),
            )


def recorded(step: Any, args: Sequence[Any]) -> tuple[Completion, Recorder]:
    """A step with nothing kept, and what JAX asks about."""
    recorder = Recorder()
    with chosen(recorder):
        return step.complete(*args), recorder


def flops(time: Estimate) -> float:
    """FLOPs of matrix products and convolutions on one device."""
    return sum(part.matmul_flops for part in time.parts)


def _key(op: Op) -> Key:
    equation = op.site[0]
    return key_of(equation.primitive, [v.aval for v in equation.invars], equation.params)


def _action(key: Key, policies: Sequence[Policy]) -> str:
    """What policies do to a value."""
    counts = Counter(_action_of(key, policy) for policy in policies)
    found = list(counts)
    return (
        found[0] if len(found) == 1 else ", ".join(f"{action} {counts[action]} of {len(policies)}" for action in found)
    )


def _aliases(graph: Graph) -> set[Key]:
    """The unnamed values that only move data to become named ones."""
    found = set()
    for op in graph.ops:
        maker = op if op.name == "name" else None
        while maker is not None and (maker.name in MOVES or maker.name == "name"):
            maker = graph.makers.get(maker.operands[0])
        if op.name == "name" and maker is not None and maker.site and maker.name in MATMULS:
            found.add(_key(maker))
    return found


def _action_of(key: Key, policy: Policy) -> str:
    if key in policy.saved or EVERYTHING in policy.saved:
        return KEEP
    if (count := dict(policy.snapshots).get(key)) is not None:
        return f"{count} snapshots"
    return OFFLOAD if key in policy.offloaded else RECOMPUTE


def _known(completion: Completion) -> Hardware:
    """The hardware of the mesh, None, or a typical chip where that is unknown."""
    try:
        completion.estimate()
    except ShardingError:
        return TYPICAL[completion.memory().platform]
    return None


def _named(names: Sequence[str], keys: dict[Key, list[Group]]) -> dict[Key, list[Group]]:
    """The values with these names."""
    there = [key[1] for key in keys if key[0] == "name"]
    unknown = [name for name in names if name not in there]
    if unknown:
        near = [close for name in unknown for close in difflib.get_close_matches(name, there, n=1, cutoff=0.4)]
        raise ShardingError(
            f"remat.fit(names={list(names)!r})",
            found=f"no value named {', '.join(map(repr, unknown))}; names are {', '.join(sorted(there)) or 'none'}",
            required="names given by checkpoint_name in the blocks",
            fix=[f"did you mean {one!r}?" for one in near],
        )
    return {key: groups for key, groups in keys.items() if key[0] == SCAN or key[1] in names}
