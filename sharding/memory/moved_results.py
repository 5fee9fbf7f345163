"""Results of a program that other devices write: XLA:TPU copies them in the end.

An all-gather, all-to-all or collective-permute writes into other devices' memory, but not into a program's results:
these are copied from temporaries that live until the end. A donated argument whose buffer such a result takes is copied
before anything runs, and read from the copy, unless it is what the collective moves. A loop updates that copy in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .compiler_traits import CompilerTraits
from .emitter import MOVES
from .heap_simulator import aligned
from .instruction import Instruction
from .liveness import Buffer, Lifetimes
from .stored_arrays import StoredArrays


def copy_moved_results(
    lifetimes: Lifetimes,
    results: Sequence[Instruction],
    donated: Mapping[Instruction, Instruction],
    traits: CompilerTraits,
) -> None:
    """Add the copies to the buffers of a program.

    Args:
        donated: result -> the argument whose buffer it takes.
        traits: of the compiler.
    """
    origin = StoredArrays([kernel for step in lifetimes.steps for kernel in step.kernels], traits).origin
    buffers = {x: buffer for buffer in lifetimes.buffers for _, x in buffer.makers}
    last_read = {x: k for k, step in enumerate(lifetimes.steps) for x in step.operands}
    end = len(lifetimes.steps) - 1
    for result in dict.fromkeys(results):
        made = origin[result]
        if not is_moved(made) or result not in buffers:
            continue
        buffers[result].is_temporary, buffers[result].dies = True, end
        argument = donated.get(result)
        if (
            argument is not None
            and argument in last_read
            and made.role != "tuple-element"
            and made.operands != [argument]
        ):
            copy = Instruction("copy", "unfusible", [argument], argument.shape, argument.num_bytes, argument.padding,
                               value=argument.value)  # fmt: skip
            lifetimes.buffers.append(Buffer(aligned(copy.stored_bytes), 0, last_read[argument], [(0, copy)]))
    lifetimes.peak = None


def is_moved(one: Instruction) -> bool:
    """Whether a collective without arithmetic makes it, or a loop of whose body it is a result that one makes."""
    if one.role != "tuple-element":
        return one.name in MOVES
    if one.operands[0].name == "cond":
        return False
    return any(is_moved(x) for body in one.operands[0].bodies for x in body.results[one.element : one.element + 1])
