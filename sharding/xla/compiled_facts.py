"""Collectives and memory of a compiled program."""

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

from .collective_ops import Kind, Repeated, by_kind, kind_of, totals
from .execution_counts import ExecutionCount, execution_counts
from .hlo import Array, Computation, Instruction, Module, Tree, arrays, read_module
from .replica_groups import mesh_axes, mesh_subaxes, read_groups, wrong_mesh_error

Sizes: TypeAlias = "Mesh | AbstractMesh | Mapping[str, int]"
"""A mesh, or its axis sizes, major axis first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollective(Repeated):
    """One array of a collective instruction in a compiled program.

    `count` is the product of the trip counts of the enclosing loops.
    """

    axes: tuple[Axis, ...] | None
    """Mesh axes of its replica groups, in mesh order; None if no mesh was given."""
    shape: tuple[int, ...]
    """Local shape of the result; for a reduce-scatter of the operand."""
    is_counted: bool
    """Whether all those trip counts are known; an unknown one is taken as 1."""
    is_conditional: bool
    """Whether it is in a branch of a conditional; `count` assumes that every branch runs."""
    op_name: str
    """JAX's name stack, such as `jit(f)/while/body/psum`."""
    source: str
    """`file.py:line (function)` of the user's code; empty where XLA kept none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledMemory:
    """Bytes per device, as XLA allocates them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Outputs that alias donated arguments."""
    temp_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments + temporaries + outputs - aliased."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFacts:
    """Facts about a compiled program, read from its HLO and memory analysis."""

    collectives: tuple[CompiledCollective, ...]
    """One per array, also where XLA combined several into one instruction; callers before callees."""
    memory: CompiledMemory | None
    """None where the backend has no memory analysis."""

    def by_kind(self) -> dict[Kind, tuple[int, int]]:
        """Kind -> (collectives executed per call of the program, their bytes)."""
        return by_kind(self.collectives)

    def by_axes(self) -> dict[tuple[Kind, tuple[Axis, ...] | None], tuple[int, int]]:
        """(Kind, axes) -> (collectives executed per call of the program, their bytes)."""
        return totals(((c.kind, c.axes), c) for c in self.collectives)

    @property
    def total_bytes(self) -> int:
        """Bytes of all collectives."""
        return sum(c.bytes for c in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """Bytes that each device sends in all collectives, by `wire_bytes`."""
        return sum(c.wire_bytes for c in self.collectives)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one device. Raises ShardingError without a memory analysis."""
        if self.memory is None:
            required = "facts from read_compiled, on a backend with memory analysis"
            raise ShardingError("peak_bytes of a compiled program", found="no memory analysis", required=required)
        return self.memory.peak_bytes


def read_compiled(compiled: jax.stages.Compiled, *, mesh: Sizes | None = None) -> CompiledFacts:
    """The collectives and memory of a compiled program.

    Args:
        compiled: the result of `jax.jit(f).lower(...).compile()`, or of `sharding.jit`.
        mesh: the mesh it was compiled for; only needed for `.axes`.

    Raises:
        ShardingError: if the program has another number of devices than the mesh, or isn't compiled.

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
    """The collectives of a program's HLO text; `read_compiled` without the memory."""
    module = read_module(text)
    sizes = None if mesh is None else dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if sizes and module.num_devices not in (1, math.prod(sizes.values())):
        raise wrong_mesh_error(sizes, found=f"a program for {module.num_devices} devices")
    counts = execution_counts(module)
    starts = {name: _started_chains(module.computations[name]) for name in counts}
    all_started = frozenset(chain for chains in starts.values() for chain in chains)
    continued = {name: all_started - own for name, own in starts.items()}  # later parts of one started elsewhere
    found = [
        collective
        for name, executions in counts.items()
        for line in module.computations[name].values()
        if not continued[name] or line.attribute(_CHAIN) not in continued[name]
        for collective in _collectives(module, name, line, executions, sizes)
    ]
    return CompiledFacts(collectives=tuple(found), memory=None)


def _collectives(
    module: Module, computation: str, line: Instruction, executions: ExecutionCount, sizes: Mapping[str, int] | None
) -> Iterator[CompiledCollective]:
    """One collective per array of a collective instruction; none for other instructions."""
    kind = kind_of(line)
    lines = module.computations[computation]
    if kind is None or (kind == "collective-permute" and _realigns(lines, line)):
        return
    groups = read_groups(line.attributes, module.num_devices)
    if "source_target_pairs=" in line.attributes:
        if all(source == target for source, target in groups):
            return  # a copy
        num_devices, axes_of_groups = 2, mesh_axes
    else:
        num_devices, axes_of_groups = max(map(len, groups)), mesh_subaxes
    is_scattered = kind == "all-reduce" and _REDUCE_SCATTER in computation
    if is_scattered:
        kind = "reduce-scatter"
    axes = None if sizes is None else axes_of_groups(groups, sizes)
    found = _unpadded(lines, line) if is_scattered else _flattened(module, lines, line)
    for array in found or _arrays(line, num_devices):
        yield CompiledCollective(
            kind=kind,
            axes=axes,
            num_devices=num_devices,
            dtype=array.dtype,
            shape=array.shape,
            result_bytes=array.num_bytes,
            count=executions.times,
            is_counted=executions.is_counted,
            is_conditional=executions.is_conditional,
            op_name=line.op_name,
            source=module.source(line),
        )


_CHAIN = r'chain_id="(\w+)"'
_START = "AsyncCollectiveStart"
"""XLA:TPU fuses steps of a collective into the products beside it. Each of these fusions has the instruction again, all
with one chain number: the first one with a call that starts it, the last one with a call that ends it."""


def _started_chains(lines: Computation) -> frozenset[str]:
    """The chains of the collectives that are started in a computation."""
    if not any(_START in line.attributes for line in lines.values() if line.opcode == "custom-call"):
        return frozenset()
    return frozenset(line.attribute(_CHAIN) for line in lines.values() if kind_of(line) is not None) - {""}


_REDUCE_SCATTER = "all-reduce-scatter"
"""Part of the names of XLA:TPU's fusions of an all-reduce and each device's slice."""


def _unpadded(lines: Computation, line: Instruction) -> list[Array]:
    """The array of a reduce-scatter that XLA:TPU pads to equal shares of its rings; empty for others."""
    source = lines.get(line.operands[0])
    if source is None or source.opcode != "pad":
        return []
    return list(arrays(lines[source.operands[0]].result))


_MOVES = ("bitcast", "convert", "copy", "copy-done", "copy-start", "slice")
"""Ops between a padded reduce-scatter and the permute of its rows: XLA:TPU copies between kinds of memory."""


def _realigns(lines: Computation, line: Instruction) -> bool:
    """Whether a permute moves rows between the padded shards of a reduce-scatter: it is the end of that."""
    made, is_part = lines.get(line.operands[0]), False
    while made is not None and made.opcode in _MOVES:
        is_part |= made.opcode == "slice"
        made = lines.get(made.operands[0])
    if made is None or not is_part or made.opcode != "fusion":
        return False
    return _REDUCE_SCATTER in made.attribute(r"calls=%?([\w.\-]+)")


def _arrays(line: Instruction, num_devices: int) -> list[Array]:
    """The arrays of a collective: results, or the operands of a reduce-scatter."""
    results = list(arrays(_result_type(line)))
    opcode = line.opcode.removesuffix("-start")
    dims = [int(n) for n in re.findall(r"\d+", line.attribute(r"\bdimensions=\{([\d,]*)\}"))]
    if opcode == "all-to-all" and not dims:  # XLA:CPU: one operand and one result per device, pieces of one array
        return [Array(results[0].dtype, (len(results), *results[0].shape))]
    if opcode == "reduce-scatter":
        return [_grown(array, dims[0], num_devices) for array in results]
    return results


def _flattened(module: Module, lines: Computation, line: Instruction) -> list[Array]:
    """The arrays of an all-reduce that XLA:GPU flattened into one buffer (`AllReduceContiguous`); empty for others.

    A concatenation that the program asks for has a name.
    """
    source = lines.get(line.operands[0]) if line.opcode.startswith("all-reduce") and len(line.operands) == 1 else None
    while source is not None and source.opcode == "bitcast":
        source = lines.get(source.operands[0])
    if source is not None and source.opcode == "fusion":
        called = source.attribute(r"calls=%?([\w.\-]+)")
        source, lines = module.root(called), module.computations[called]
    if source is None or source.opcode != "concatenate" or source.op_name:
        return []
    found = [lines[name].result for name in source.operands]
    return [array for array in found if isinstance(array, Array)]


def _result_type(line: Instruction) -> Tree:
    """The result type of a collective, without the operands and contexts in the type of an asynchronous start."""
    result = line.result
    if isinstance(result, Array):
        return result
    if line.opcode == "recv":
        return result[0]
    if line.opcode == "all-reduce-start" and isinstance(result[0], Array):
        return result  # the older form, which has only the results
    return result[1] if line.opcode.endswith("-start") else result


def _grown(array: Array, dim: int, factor: int) -> Array:
    shape = list(array.shape)
    shape[dim] *= factor
    return Array(array.dtype, tuple(shape))
