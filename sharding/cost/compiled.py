"""What XLA made of a program: the collectives that it runs, and the memory that it takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from sharding.errors import ShardingError
from sharding.spec import Axis

from .collective import KINDS, Kind, Repeated, by_kind, totals
from .groups import axes_of, other_mesh, parts_of, read_groups
from .hlo import Array, Instruction, Module, Tree, arrays, read_module
from .runs import Runs, runs_of_computations

Sizes: TypeAlias = "Mesh | AbstractMesh | Mapping[str, int]"
"""A mesh, or the sizes of its axes in the order of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective(Repeated):
    """One array that one instruction of a compiled program moves among devices.

    `count` is the product of the trip counts of the loops around it.
    """

    axes: tuple[Axis, ...] | None
    """Mesh axes that its groups of devices run along, in the mesh's order; None where no mesh was given."""
    shape: tuple[int, ...]
    """Of the array that one device gets; for a reduce-scatter of the one that it gives."""
    is_counted: bool
    """Whether all those trip counts are known; an unknown one is taken as 1."""
    is_conditional: bool
    """Whether it is in a branch, so that it may not run at all; `count` takes each branch as run."""
    op_name: str
    """The way through the traced program, such as `jit(f)/while/body/psum`."""
    source: str
    """`file.py:line (function)` of the user's line; empty where XLA kept none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes on one device, as XLA allocates them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Of results that are written over donated arguments."""
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, temporaries and results, without the results that take an argument's place."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFacts:
    """What a compiled program does, read from the program itself."""

    collectives: tuple[CompiledCollective, ...]
    """One entry for each array, also of those that XLA combined into one instruction; callers before what they call."""
    memory: CompiledMemory | None
    """None where the backend does not say."""

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Kind -> (how many run per call of the program, their bytes)."""
        return by_kind(self.collectives)

    def by_axes(self) -> dict[tuple[Kind, tuple[Axis, ...] | None], tuple[int, int]]:
        """(Kind, axes) -> (how many run per call of the program, their bytes)."""
        return totals(((c.kind, c.axes), c) for c in self.collectives)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(c.bytes for c in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """What each device sends in all collectives, as `wire_bytes` counts it."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def peak_bytes(self) -> int:
        """Memory of one device. Raises ShardingError where the backend does not say."""
        if self.memory is None:
            must = "the backend analyses memory, and the facts come from read_compiled"
            raise ShardingError("peak_bytes of a compiled program", there="no memory analysis", must=must)
        return self.memory.peak_bytes


def read_compiled(compiled: jax.stages.Compiled, *, mesh: Sizes | None = None) -> CompiledFacts:
    """The collectives and the memory of a compiled program.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` gives, or that of `sharding.jit`.
        mesh: the one that it was compiled for. Needed for `.axes` alone.

    Raises:
        ShardingError: the program runs on another number of devices than the mesh has; or it isn't compiled.

    Example:
        >>> import jax
        >>> facts = read_compiled(jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), "float32")).compile())
        >>> facts.by_kind(), facts.memory.argument_bytes
        ({}, 16)
    """
    facts = read_hlo(compiled.as_text() or "", mesh=mesh)
    stats = compiled.memory_analysis()
    if stats is None:
        return facts
    memory = CompiledMemory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    return CompiledFacts(collectives=facts.collectives, memory=memory)


def read_hlo(text: str, *, mesh: Sizes | None = None) -> CompiledFacts:
    """The collectives of a program in XLA's text form, without the memory; otherwise as `read_compiled`."""
    module = read_module(text)
    sizes = None if mesh is None else dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if sizes and module.num_devices not in (1, math.prod(sizes.values())):
        raise other_mesh(sizes, there=f"a program for {module.num_devices} devices")
    found = [
        entry
        for name, runs in runs_of_computations(module).items()
        for line in module.computations[name].values()
        for entry in _entries(module, name, line, runs, sizes)
    ]
    return CompiledFacts(collectives=tuple(found), memory=None)


# What XLA calls them. A broadcast sends one array on, as a permute does; a ragged all-to-all has the room that it may
# fill; a receive with its pairs is half of a permute that XLA:GPU took apart (the other half, the send, is left out).
_KINDS: dict[str, Kind] = {
    **{kind: kind for kind in KINDS},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "collective-permute",
    "recv": "collective-permute",
}


def _kind(line: Instruction) -> Kind | None:
    kind = _KINDS.get(line.opcode.removesuffix("-start"))
    if line.opcode == "recv" and "_source_target_pairs=" not in line.attributes:
        return None  # from the host
    return kind


def _entries(
    module: Module, computation: str, line: Instruction, runs: Runs, sizes: Mapping[str, int] | None
) -> Iterator[CompiledCollective]:
    """What an instruction moves: nothing unless it is a collective."""
    kind = _kind(line)
    if kind is None:
        return
    groups = read_groups(line.attributes, module.num_devices)
    if "source_target_pairs=" in line.attributes:
        num_devices, runs_along = 2 if any(a != b for a, b in groups) else 1, axes_of
    else:
        num_devices, runs_along = max(map(len, groups)), parts_of
    if kind == "all-reduce" and "all-reduce-scatter" in computation:
        kind = "reduce-scatter"  # XLA:TPU's fusion of an all-reduce and the slice of each device
    axes = None if sizes is None else runs_along(groups, sizes)
    for array in _moved(line, num_devices):
        yield CompiledCollective(
            kind=kind,
            axes=axes,
            num_devices=num_devices,
            dtype=array.dtype,
            shape=array.shape,
            result_bytes=array.num_bytes,
            count=runs.times,
            is_counted=runs.is_counted,
            is_conditional=runs.is_conditional,
            op_name=line.op_name,
            source=module.source(line),
        )


def _moved(line: Instruction, num_devices: int) -> list[Array]:
    """The arrays that a collective moves, as `CompiledCollective.shape` means them."""
    gets = list(arrays(_given(line)))
    opcode = line.opcode.removesuffix("-start")
    dims = [int(n) for n in re.findall(r"\d+", line.attribute(r"\bdimensions=\{([\d,]*)\}"))]
    if opcode == "all-to-all" and not dims:  # XLA:CPU: one operand and one result for each device, pieces of one array
        return [Array(gets[0].dtype, (len(gets), *gets[0].shape))]
    if opcode == "reduce-scatter":
        return [_times(array, dims[0], num_devices) for array in gets]
    return gets


def _given(line: Instruction) -> Tree:
    """The type of what a collective gives in the end; a start also has its operands and its locks in its type."""
    result = line.result
    if isinstance(result, Array):
        return result
    if line.opcode == "recv":
        return result[0]
    if line.opcode == "all-reduce-start" and isinstance(result[0], Array):
        return result  # the older form, which has the results alone
    return result[1] if line.opcode.endswith("-start") else result


def _times(array: Array, dim: int, times: int) -> Array:
    shape = list(array.shape)
    shape[dim] *= times
    return Array(array.dtype, tuple(shape))
