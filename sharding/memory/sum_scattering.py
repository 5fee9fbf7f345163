"""All-reduces whose result is only sliced, which XLA:GPU turns into reduce-scatters; see
`explain.reduce_scatter_creation`."""

from __future__ import annotations

import math

from .instruction import Body, Instruction, Users, array_bytes, users
from .primitive_traits import masks_rows


def scatter_sums(body: Body) -> None:
    """Rewrite a body, its loops and its branches."""
    readers, results = users(body.instructions), {*body.results, *body.effects}
    for one in body.instructions:
        for inner in one.bodies:
            scatter_sums(inner)
        if one.name == "all-reduce" and one.group is not None and not (one.eqn is not None and masks_rows(one.eqn)):
            _scatter(one, readers, results)


def _scatter(one: Instruction, readers: Users, results: set[Instruction]) -> None:
    """Turns an all-reduce, with the conversions behind it, into a reduce-scatter if each device keeps one part."""
    converted = [one]
    while len(users_ := readers[converted[-1]]) == 1 and users_[0].name == "convert_element_type":
        converted.append(users_[0])
    slices = readers[converted[-1]]
    if not slices or any(x in results for x in converted) or not all(_keeps_a_part(x, one) for x in slices):
        return
    shape = slices[0].shape
    if any(x.shape != shape for x in slices):
        return
    one.name, one.in_place = "reduce-scatter", ()
    for x in converted:
        x.num_bytes, x.shape = array_bytes(math.prod(shape), x.itemsize), shape
    for x in slices:
        x.role = "bitcast"


def _keeps_a_part(x: Instruction, one: Instruction) -> bool:
    """Whether each device of an all-reduce keeps another part of one dim of it."""
    split = [d for d, (have, kept) in enumerate(zip(one.shape, x.shape, strict=False)) if have != kept]
    return x.name == "slice" and bool(x.axes) and {*x.axes} == {*one.axes} and len(split) == 1
