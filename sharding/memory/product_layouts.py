"""Operands of matrix products that XLA:GPU stores transposed.

A product reads matrices, or stacks of them: batch dims must lie side by side. Where they don't, as in attention over
`[batch, length, heads, features]`, what computes an operand writes it in another layout, at no cost. An argument of the
program keeps the layout that it came in: it is copied, also if a slice or an op on each element lies between, and in
front of the loops that read it. A cache that is updated in place is copied before, and the result is copied back
(openxla/xla, `service/gpu/transforms/layout_assignment.cc`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from .instruction import Body, Instruction, users
from .primitive_traits import updates


def transpose_operands(body: Body) -> None:
    """Adds these copies to a program."""
    copies = _Copies({*body.results})
    for one in body.instructions:
        moved = {x for x in _needed_inside(one) if _is_given(x)}
        one.operands = [copies.of(x, one) if x in moved else x for x in one.operands]
        for k, x in _read_apart(one):
            if not _is_given(x):
                continue
            if chain := _updates(x):
                copies.around(chain)
            else:
                one.operands[k] = copies.of(x, one)
    body.instructions = [*(x for one in body.instructions for x in (*copies.before[one], one)), *copies.back.values()]
    body.results = [copies.back.get(x, x) for x in body.results]


def transpose_results(body: Body) -> None:
    """Has products write their results in the order of dims in which they are read."""
    readers = users(body.instructions)
    for one in body.instructions:
        if one.name == "transpose" and one.role == "fusible" and one.operands:
            (x,) = one.operands
            if x.product is not None and len(readers[x]) == 1 and x not in body.results:
                one.role = "bitcast"


class _Copies:
    """The copies to add.

    Args:
        results: of the program.
    """

    def __init__(self, results: set[Instruction]) -> None:
        self.results = results
        self.made: dict[Instruction, Instruction] = {}
        self.before: defaultdict[Instruction, list[Instruction]] = defaultdict(list)
        """Instruction -> the copies that it is the first to read."""
        self.back: dict[Instruction, Instruction] = {}
        """Result -> its copy in the program's layout."""

    def of(self, x: Instruction, reader: Instruction) -> Instruction:
        """The transposed copy of an array, stored once."""
        if x not in self.made:
            self.made[x] = _copy(x, [x])
            self.before[reader].append(self.made[x])
        return self.made[x]

    def around(self, chain: Sequence[Instruction]) -> None:
        """Has some updates in place, the last one first, update a transposed array, and transposes results back.

        The kernel of such a result updates the transposed array anew, and so the first update is of a copy of it.
        """
        first = chain[-1]
        first.operands[0] = source = self.of(first.operands[0], first)
        if self.results.intersection(chain):
            first.operands[0] = _copy(source, [source])
            self.before[first].append(first.operands[0])
        for k, one in enumerate(chain):
            if one in self.results:
                self.back[one] = _copy(one, [source, *(y for each in chain[k:] for y in each.operands[1:])])


def _copy(x: Instruction, operands: list[Instruction]) -> Instruction:
    facts = {"value": x.value, "eqn": x.eqn, "fuses_operands": x.role == "fusible", "phase": x.phase}
    return Instruction("copy", "unfusible", operands, x.shape, x.num_bytes, **facts)


def _updates(x: Instruction) -> list[Instruction]:
    """The updates in place that lead to an array, the last one first."""
    found: list[Instruction] = []
    while x.role == "bitcast" or updates(x.name):
        if updates(x.name):
            found.append(x)
        x = x.operands[0]
    return found


def _needed_inside(one: Instruction) -> Iterator[Instruction]:
    """The operands of a loop or a conditional that products inside need in another layout."""
    for body in one.bodies:
        place = {x: k for k, x in enumerate(body.arguments, len(one.operands) - len(body.arguments))}
        for inner in body.instructions:
            for x in (*_needed_inside(inner), *(x for _, x in _read_apart(inner))):
                yield from (one.operands[place[source]] for source in _sources(x) if source in place)


def _read_apart(one: Instruction) -> Iterator[tuple[int, Instruction]]:
    """The operands of a product whose batch dims don't lie side by side, and their indices."""
    if one.product is None or len(one.operands) != 2:
        return
    _, batch = one.eqn.params["dimension_numbers"]
    for k, (x, dims) in enumerate(zip(one.operands, batch, strict=True)):
        if not _lie_together(x.shape, dims):
            yield k, x


def _lie_together(shape: Sequence[int], dims: Sequence[int]) -> bool:
    large = [d for d, size in enumerate(shape) if size > 1]
    return are_adjacent(large.index(d) for d in dims if shape[d] > 1)


def are_adjacent(places: Iterable[int]) -> bool:
    """Whether some places follow each other, in any order."""
    found = sorted(places)
    return all(b == a + 1 for a, b in zip(found, found[1:], strict=False))


def _is_given(x: Instruction) -> bool:
    """Whether only arguments are read to compute an array; of one that is updated in place, what it was before."""
    sources = _sources(x)
    return bool(sources) and all(source.role == "argument" for source in sources)


def _sources(x: Instruction) -> set[Instruction]:
    """What is read from memory to compute an array, but scalars."""
    found: set[Instruction] = set()
    seen, waiting = {x}, [x]
    while waiting:
        one = waiting.pop()
        if one.role not in ("bitcast", "fusible") and not updates(one.name):
            found.add(one)
            continue
        operands = one.operands[:1] if updates(one.name) else one.operands
        new = [y for y in operands if y not in seen and y.num_elements > 1]
        seen.update(new)
        waiting += new
    return found
