"""Collective kinds and the bytes that each sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from .hlo import Instruction

Kind = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"]

KINDS: tuple[Kind, ...] = get_args(Kind)

SUMS: tuple[Kind, ...] = ("all-reduce", "reduce-scatter")
"""The reductions."""

OPCODES: Mapping[str, Kind] = {
    **{kind: kind for kind in KINDS},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "collective-permute",
    "recv": "collective-permute",
}
"""HLO opcode -> kind.

A broadcast forwards one array, as a permute does; a ragged all-to-all counts its capacity; a recv with source-target
pairs is half of a permute that XLA:GPU decomposed (the other half, the send, is left out).
"""


def kind_of(instruction: Instruction) -> Kind | None:
    """The kind of a compiled instruction; None if it is no collective, or the end of an asynchronous one."""
    if instruction.opcode == "recv" and "_source_target_pairs=" not in instruction.attributes:
        return None  # from the host
    return OPCODES.get(instruction.opcode.removesuffix("-start"))


def wire_bytes(kind: Kind, num_bytes: int, num_devices: int) -> int:
    """Bytes that each device sends by the ring algorithm, rounded down.

    Args:
        kind: of collective.
        num_bytes: of one device's result; for a reduce-scatter of its operand.
        num_devices: per group.

    With V = `num_bytes` and n = `num_devices`: an all-gather, a reduce-scatter and an all-to-all send V (n - 1) / n, an
    all-reduce twice that, a permute V (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, section 3).
    """
    if num_devices <= 1:
        return 0
    if kind == "collective-permute":
        return num_bytes
    once = num_bytes * (num_devices - 1) // num_devices
    return 2 * once if kind == "all-reduce" else once


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A collective and its execution count; the base of predicted and compiled ones."""

    kind: Kind
    num_devices: int
    """Per group; 2 for a compiled permute, 1 where nothing leaves its device."""
    count: int
    """Executions per call of the program; an unknown trip count is taken as 1."""
    result_bytes: int
    """Bytes of one device's result per execution; for a reduce-scatter of its operand."""
    dtype: str

    @property
    def bytes(self) -> int:
        """`result_bytes` of all executions."""
        return self.result_bytes * self.count

    @property
    def wire_bytes(self) -> int:
        """Bytes that each device sends in all executions, by the ring algorithm."""
        return wire_bytes(self.kind, self.result_bytes, self.num_devices) * self.count


_Key = TypeVar("_Key")


def totals(pairs: Iterable[tuple[_Key, Repeated]]) -> dict[_Key, tuple[int, int]]:
    """Key -> (collectives executed per call of the program, their bytes), in order of first occurrence."""
    found: dict[_Key, tuple[int, int]] = {}
    for key, c in pairs:
        count, num_bytes = found.get(key, (0, 0))
        found[key] = (count + c.count, num_bytes + c.bytes)
    return found


def by_kind(collectives: Iterable[Repeated]) -> dict[Kind, tuple[int, int]]:
    """Kind -> (collectives executed per call of the program, their bytes)."""
    found = totals((c.kind, c) for c in collectives)
    return {kind: found[kind] for kind in KINDS if kind in found}
