"""Builder of one body's instructions, with common-subexpression elimination and resharding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..cost.gpu_latencies import devices_in_host
from ..rewrite.reshard import Step, chain
from ..spec import Axis, Spec, local_shape, num_parts
from ..xla.collective_lowering import is_slice_wide
from .compiler_traits import CompilerTraits
from .instruction import Body, Instruction, Phase, Role, array_bytes


class Cursor:
    """The position in the program at which instructions are emitted."""

    phase: Phase = ""
    eqn: Any = None
    rounded: Collection[int] = ()
    """Float32 values that are stored in bfloat16."""
    rounded_moves: Collection[tuple[int, Any]] = ()
    """Float32 values and the axes to which they are moved in bfloat16."""


MOVES = frozenset({"all-gather", "all-to-all", "collective-permute"})
"""Collectives without arithmetic."""


class Emitter:
    """Appends instructions to a body.

    Args:
        sizes: of the mesh axes.
        cursor: shared by all bodies of a program.
        permutes: whether reshards may be collective-permutes: not where only some devices run the body.
    """

    def __init__(self, sizes: Mapping[str, int], cursor: Cursor, traits: CompilerTraits, *, permutes: bool = True):
        self.body = Body(traits=traits)
        self.sizes = sizes
        self.traits = traits
        self.permutes = permutes
        self.cursor = cursor
        self._made: dict[Any, Instruction] = {}
        self._local_shapes: dict[tuple[int, tuple[int, ...]], tuple[Spec, tuple[int, ...]]] = {}
        """By the identity of a spec, which is kept, and shape."""
        self.carried: set[Instruction] = set()
        """Operands that a loop updates in place."""

    def emit(self, name: str, role: Role, operands: Sequence[Instruction], shape: Sequence[int], itemsize: float,
             *, key: Any = None, **facts: Any) -> Instruction:  # fmt: skip
        """Append an instruction of a local shape, or return the equal one that the body already has.

        Args:
            name: the primitive or collective.
            role: how it is computed.
            operands: the instructions it reads.
            shape: local shape of the result.
            itemsize: bytes per element; 2 for values that are stored in bfloat16, half a byte for those of 4 bits.
            key: what it depends on besides name, operands and shape, for common-subexpression elimination; None: never
                shared.
            facts: further fields of the instruction.
        """
        shape = tuple(shape)
        itemsize = self.stored_itemsize(itemsize, facts.get("value"))
        if "axes" in facts:
            facts["num_devices"] = devices_in_host(facts["axes"], self.sizes)
        full = (name, tuple(operands), shape, itemsize, key)
        if key is not None and full in self._made:
            return self._made[full]
        made = Instruction(
            name, role, list(operands), shape, array_bytes(math.prod(shape), itemsize), phase=self.cursor.phase, **facts
        )
        self.body.instructions.append(made)
        if key is not None:
            self._made[full] = made
        return made

    def stored_itemsize(self, itemsize: float, value: int | None) -> float:
        """Bytes per element of an array with a value."""
        return min(itemsize, 2) if value in self.cursor.rounded else itemsize

    def stored_as(self, x: Instruction, value: int | None) -> Instruction:
        """An array, rounded if that is how a value is stored."""
        return self.rounded(x) if self.stored_itemsize(x.itemsize, value) < x.itemsize else x

    def argument(self, shape: Sequence[int], itemsize: float, value: int | None) -> Instruction:
        """Append an argument of the body."""
        made = self.emit("argument", "argument", [], shape, itemsize, value=value)
        self.body.arguments.append(made)
        return made

    def constant(self, shape: Sequence[int], itemsize: float, *, is_shared: bool = True) -> Instruction:
        """A broadcast constant, where an op needs it in memory; a shared one is for ops that only read it."""
        key = "constant" if is_shared else None
        return self.emit("broadcast", "fusible", [], shape, itemsize, key=key, elementwise=True)

    def owned(self, x: Instruction) -> Instruction:
        """An array to update in place: a copy where it is an argument or also updated elsewhere."""
        if x.role == "argument" or x in self.carried:
            return self.emit("copy", "unfusible", [x], x.shape, x.itemsize, value=x.value, eqn=x.eqn)
        self.carried.add(x)
        return x

    def tuple_elements(
        self, source: Instruction, elements: Sequence[tuple[Sequence[int], float, int | None, Any]]
    ) -> list[Instruction]:
        """The results of an instruction with several.

        Args:
            elements: local shape, bytes per element, the graph's value and the equation that makes it, of each.
        """
        return [
            self.emit(source.name, "tuple-element", [source], shape, itemsize, value=value, eqn=eqn, element=k)
            for k, (shape, itemsize, value, eqn) in enumerate(elements)
        ]

    def transposed(self, x: Instruction, order: Sequence[int]) -> Instruction:
        """An array with its dims permuted."""
        if x.is_in_order(order):
            return x
        shape, facts = [x.shape[d] for d in order], {"value": x.value, "eqn": x.eqn}
        return self.emit("transpose", "fusible", [x], shape, x.itemsize, key=tuple(order), **facts)

    def local_shape(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """The local shape of an array of a global shape, padded as XLA pads."""
        found = self._local_shapes.get((id(spec), shape))
        if found is None:
            found = self._local_shapes[id(spec), shape] = spec, local_shape(spec.axes, shape, self.sizes)
        return found[1]

    def reshard(self, x: Instruction, shape: tuple[int, ...], itemsize: float, have: Spec, need: Spec) -> Instruction:
        """The array resharded by the cheapest chain of steps.

        Args:
            shape: global.
            itemsize: bytes per element, by which chains are compared.
        """
        if have is need or have.axes == need.axes:
            return x
        return self.apply_steps(
            x, shape, itemsize, chain(have, need, shape, math.ceil(itemsize), self.sizes, permutes=self.permutes)
        )

    def apply_steps(
        self, x: Instruction, shape: tuple[int, ...], itemsize: float, steps: Sequence[Step]
    ) -> Instruction:
        """The array after some reshard steps."""
        for step in steps:
            before = x
            if step.kind in MOVES and (x.value, step.spec.axes) in self.cursor.rounded_moves:
                x, itemsize = x if x.itemsize == 2 else self.rounded(x), 2
            x = self.apply_step(x, self.local_shape(shape, step.spec), itemsize, step)
            if x is not before:
                x.spec, x.asked_by = step.spec, x.asked_by or self.cursor.eqn
        return x

    def apply_step(self, x: Instruction, shape: tuple[int, ...], itemsize: float, step: Step) -> Instruction:
        """The array after one reshard step.

        A reduce-scatter is an all-reduce and a slice on XLA:CPU, which sends 16-bit floats as float32, and over all
        devices of a TPU slice; an all-reduce to a smaller local shape slices first.

        Args:
            shape: local shape of the result.
        """
        if itemsize == 2 and self.traits.widens_16_bits and step.kind in MOVES:
            return self.rounded(self.apply_step(self.widened(x), shape, 4, step))
        key, facts = step.spec.axes, {"value": x.value, "eqn": x.eqn}
        sent = {**facts, "axes": step.axes}
        if step.kind == "all-gather" and self.traits.gathers_leading_dim:
            return self.all_gather(x, shape, itemsize, step)
        if step.kind in ("all-gather", "collective-permute"):
            group = step.axes if self.traits.combines_all and step.kind == "all-gather" else None
            return self.emit(step.kind, "unfusible", [x], shape, itemsize, key=key, group=group, **sent)
        if step.kind == "all-to-all":
            return self.all_to_all(x, shape, itemsize, step)
        scatters = self.traits.reduces_in_place and not self.sums_everywhere(step.axes)
        if step.kind == "reduce-scatter" and scatters and len(step.dims) == 1:
            group = (step.axes, itemsize) if self.traits.combines_all else None
            return self.emit(step.kind, "unfusible", [x], shape, itemsize, group=group, **sent)
        if step.kind == "reduce-scatter":
            x = self.all_reduce(x, itemsize, step.axes)
        if x.shape != shape:
            x = self.emit("slice", "fusible", [x], shape, itemsize, key=key, **sent)
        return self.all_reduce(x, itemsize, step.axes) if step.kind == "all-reduce" else x

    def sums_everywhere(self, axes: tuple[Axis, ...]) -> bool:
        """Whether a reduce-scatter over some axes is an all-reduce, since it is over all devices of a TPU slice."""
        return self.traits.sums_slices and is_slice_wide(num_parts(axes, self.sizes), math.prod(self.sizes.values()))

    def all_gather(self, x: Instruction, shape: Sequence[int], itemsize: float, step: Step) -> Instruction:
        """An all-gather that concatenates shards along a leading dim; other dims are moved there and back."""
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        dim = next((d for d, (have, need) in enumerate(zip(x.shape, shape, strict=True)) if have != need), 0)
        order = [dim, *(d for d in range(len(shape)) if d != dim)]
        x = self.transposed(x, order)
        gathered = self.emit(
            step.kind,
            "unfusible",
            [x],
            [shape[d] for d in order],
            itemsize,
            key=step.spec.axes,
            axes=step.axes,
            **facts,
        )
        return self.transposed(gathered, [order.index(d) for d in range(len(shape))])

    def all_to_all(self, x: Instruction, shape: Sequence[int], itemsize: float, step: Step) -> Instruction:
        """An all-to-all, which sends and receives parts along a new leading dim.

        XLA:CPU slices and concatenates; others transpose, unless the parts are of a leading dim.
        """
        facts: dict[str, Any] = {"value": x.value, "eqn": x.eqn, "key": step.spec.axes}
        sent, received = _dim_of_parts(x.shape, shape), _dim_of_parts(shape, x.shape)
        copies, num = self.traits.gathers_leading_dim, num_parts(step.axes, self.sizes)
        if copies or math.prod(x.shape[:sent]) > 1:
            x = self.emit("slice", "fusible", [x], shape, itemsize, **facts)
        is_joined = not copies and math.prod(shape[:received]) > 1
        parts = (num, *(-(-n // num) if d == received else n for d, n in enumerate(shape))) if is_joined else shape
        x = self.emit(step.kind, "unfusible", [x], parts, itemsize, axes=step.axes, **facts)
        if copies:
            return self.emit("concatenate", "unfusible", [x], shape, itemsize, **facts)
        return self.emit("transpose", "fusible", [x], shape, itemsize, **facts) if is_joined else x

    def all_reduce(self, x: Instruction, itemsize: float, axes: tuple[Axis, ...]) -> Instruction:
        """An all-reduce of partial sums; 16-bit floats are reduced in 32 bits.

        It writes into the buffer of the instruction that it reads, not of one that a bitcast is of (openxla/xla,
        `hlo/analysis/heap_simulator.cc`).
        """
        facts: Mapping[str, Any] = {"value": x.value, "eqn": x.eqn}
        if itemsize != 2 or not self.traits.widens_16_bits:
            is_bitcast = self.traits.reshapes_products and _is_reshaped(x)
            is_alike = x.itemsize == self.stored_itemsize(itemsize, x.value) and not is_bitcast
            in_place = ((0, 0),) if self.traits.reduces_in_place and is_alike else ()
            facts = {**facts, "group": (axes, itemsize), "in_place": in_place}
            return self.emit("all-reduce", "unfusible", [x], x.shape, itemsize, axes=axes, **facts)
        x = self.emit("convert", "fusible", [x], x.shape, 4, elementwise=True, **facts)
        x = self.emit("all-reduce", "unfusible", [x], x.shape, 4, group=(axes, 4), axes=axes, **facts)
        return self.emit("convert", "fusible", [x], x.shape, itemsize, elementwise=True, expensive=True, **facts)

    def rounded(self, wide: Instruction) -> Instruction:
        """float32 rounded to 16 bits."""
        facts: Mapping[str, Any] = {"value": wide.value, "eqn": wide.eqn, "elementwise": True, "expensive": True}
        return self.emit("convert", "fusible", [wide], wide.shape, 2, key="16", **facts)

    def widened(self, x: Instruction) -> Instruction:
        """16 bits as float32: the value before rounding, unless the program rounds it itself."""
        return self.in_32_bits(before_rounding(x) if x.name == "convert" else x)

    def in_32_bits(self, x: Instruction) -> Instruction:
        """What is stored in 16 bits, as float32."""
        if x.itemsize != 2:
            return x
        return self.emit("convert", "fusible", [x], x.shape, 4, key="32", elementwise=True, value=x.value, eqn=x.eqn)


def _is_reshaped(x: Instruction) -> bool:
    """Whether XLA:GPU computes it with other dims: a product as a matrix, a gather with dims of size 1."""
    if x.name == "gather" and x.eqn is not None and x.eqn.primitive.name == "gather":
        return bool(x.eqn.params["dimension_numbers"].collapsed_slice_dims)
    return x.product is not None and x.product.num_dims < len(x.shape)


def _dim_of_parts(whole: Sequence[int], parts: Sequence[int]) -> int:
    """The dim along which an array is in parts."""
    return next((d for d, (have, need) in enumerate(zip(whole, parts, strict=True)) if have > need), 0)


def before_rounding(x: Instruction) -> Instruction:
    """The float32 value that was rounded to 16 bits; x itself if there is none."""
    is_rounded = x.name in ("convert", "convert_element_type") and x.itemsize == 2 and len(x.operands) == 1
    return x.operands[0] if is_rounded and x.operands[0].itemsize == 4 else x
