"""Combined all-reduces in one buffer, as on XLA:GPU: operands are copied into it, and results out of it.

openxla/xla, `hlo/transforms/collectives/all_reduce_contiguous.cc`. Other combined collectives have a buffer per array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .fusion import Kernel
from .instruction import Instruction


def contiguous(units: Sequence[list[Kernel]]) -> list[list[Kernel]]:
    """Units of kernels, each combined all-reduce as kernels that concatenate, all-reduce, and slice.

    The instructions of its sums become the slices.
    """
    found: list[list[Kernel]] = []
    for unit in units:
        is_combined = len(unit) > 1 and all(kernel.root.name == "all-reduce" for kernel in unit)
        found += _in_one_buffer(unit) if is_combined else [unit]
    return found


def is_contiguous_part(x: Instruction) -> bool:
    """Whether a sum is a slice of a combined one, read through a bitcast to its dims."""
    if x.name != "slice" or len(x.operands) != 1:
        return False
    (whole,) = x.operands
    return whole.name == "all-reduce" and len(whole.shape) < len(x.shape)


def _in_one_buffer(unit: Sequence[Kernel]) -> Iterator[list[Kernel]]:
    sums = [kernel.root for kernel in unit]
    operands = list(dict.fromkeys(x for kernel in unit for x in kernel.operands))
    shape, num_bytes = (sum(x.num_elements for x in sums),), sum(x.num_bytes for x in sums)
    facts = {"eqn": sums[0].eqn, "phase": sums[0].phase}
    joined = Instruction("concatenate", "unfusible", operands, shape, num_bytes, **facts)
    reduced = Instruction(
        "all-reduce", "unfusible", [joined], shape, num_bytes, in_place=((0, 0),), axes=sums[0].axes,
        num_devices=sums[0].num_devices, **facts,
    )  # fmt: skip
    yield [Kernel(joined, [joined], operands)]
    yield [Kernel(reduced, [reduced], [joined])]
    for x in sums:
        x.name, x.operands, x.in_place, x.group = "slice", [reduced], (), None
        yield [Kernel(x, [x], [reduced])]
