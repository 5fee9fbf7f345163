"""Packing, merging and donation compared with slow references."""

import itertools
import random

import pytest

from sharding.memory.heap_simulator import ALIGNMENT, aligned, block_bytes
from sharding.memory.instruction import Body, Instruction, all_instructions, users
from sharding.memory.product_merging import MOST_BYTES, merge_products


def packed_byte_by_byte(intervals: list[tuple[int, int, int]]) -> int:
    """The heap's size: in turn each buffer goes to the start of the smallest run of free bytes that it fits."""
    waiting = sorted(intervals, key=lambda one: (-one[0], one[1] - one[2]))
    placed: list[tuple[int, int, int, int]] = []
    for size, first, last in waiting:
        taken = set()
        for at, other, begin, end in placed:
            if begin <= last and first <= end:
                taken.update(range(at, at + other))
        top = max(taken, default=-1) + 1
        runs, begin = [], None
        for byte in range(top + 1):
            free = byte not in taken and byte < top
            if free and begin is None:
                begin = byte
            if not free and begin is not None:
                runs.append((byte - begin, begin))
                begin = None
        fitting = [run for run in runs if run[0] >= size]
        placed.append((min(fitting)[1] if fitting else top, size, first, last))
    return max((at + size for at, size, _, _ in placed), default=0)


def test_packing_byte_by_byte():
    for seed in range(150):
        generator = random.Random(seed)
        intervals = []
        for _ in range(generator.randrange(14)):
            first, last = sorted(generator.choices(range(10), k=2))
            intervals.append((generator.randrange(1, 7), first, last))
        assert block_bytes(intervals) == packed_byte_by_byte(intervals), intervals


def test_alignment():
    for num_bytes in range(3 * ALIGNMENT + 1):
        found = aligned(num_bytes)
        assert found % ALIGNMENT == 0 and num_bytes <= found < num_bytes + ALIGNMENT


class Product:
    """What merging reads of an equation."""

    params = {"dimension_numbers": "mk,kn"}


def product(left: Instruction, right: Instruction, num_bytes: int = 400) -> Instruction:
    return Instruction("dot_general", "unfusible", [left, right], (num_bytes // 4,), num_bytes, eqn=Product())


def argument(num_bytes: int = 400) -> Instruction:
    return Instruction("x", "argument", [], (num_bytes // 4,), num_bytes)


def merged(*instructions: Instruction) -> Body:
    body = Body(instructions=list(instructions), results=[instructions[-1]])
    merge_products(body)
    place = {one: k for k, one in enumerate(body.instructions)}
    assert all(place[x] < place[one] for one in body.instructions for x in one.operands)
    assert {*instructions} <= {*body.instructions} and len(place) == len(body.instructions)
    return body


def test_products_of_one_operand_run_as_one():
    for side in (0, 1):
        x, weights = argument(), [argument() for _ in range(3)]
        products = [product(*((x, w) if side == 0 else (w, x))) for w in weights]
        end = Instruction("end", "unfusible", list(products), (1,), 4)
        body = merged(x, *weights, *products, end)
        (one,) = [each for each in body.instructions if each.name == "dot_general"]
        assert one.num_bytes == sum(each.num_bytes for each in products) and {*one.operands} == {x, *weights}
        assert one.shape == (300,)
        assert all((each.name, each.role, each.operands) == ("slice", "fusible", [one]) for each in products)


def test_products_that_stay_apart():
    """Those of other sides or dims, those that depend on each other, and two large ones."""
    x, w, v = argument(), argument(), argument()
    assert [each.name for each in merged(x, w, v, product(x, w), product(v, x)).instructions].count("dot_general") == 2
    first = product(x, w)
    body = merged(x, w, first, product(x, first))
    assert [each.name for each in body.instructions].count("dot_general") == 2
    other = product(x, v)
    other.eqn = type("Other", (), {"params": {"dimension_numbers": "km,kn"}})()
    assert [each.name for each in merged(x, w, v, product(x, w), other).instructions].count("dot_general") == 2
    # Through an op between them, too.
    a, b = product(x, w), None
    between = Instruction("exp", "fusible", [a], (100,), 400)
    b = product(x, between)
    assert [each.name for each in merged(x, w, a, between, b).instructions].count("dot_general") == 2


@pytest.mark.parametrize("off", [-4, 0, 4])
def test_one_of_two_must_be_small(off: int):
    """Its result and the operand that it doesn't share: together at most the limit."""
    x = argument()
    for small_first in (True, False):
        small = product(x, argument(400), MOST_BYTES - 400 + off)
        large = product(x, argument(400), 4 * MOST_BYTES)
        order = (small, large) if small_first else (large, small)
        body = merged(x, small.operands[1], large.operands[1], *order)
        count = [each.name for each in body.instructions].count("dot_general")
        assert count == (1 if off <= 0 else 2)


def test_products_in_loops_are_merged_too():
    x, w, v = argument(), argument(), argument()
    inner = Body(instructions=[x, w, v, product(x, w), product(x, v)])
    loop = Instruction("scan", "unfusible", [], (1,), 4, bodies=(inner,))
    body = Body(instructions=[loop], results=[loop])
    merge_products(body)
    assert [one.name for one in all_instructions(body)].count("dot_general") == 1


def test_live_instructions_and_users_by_walking():
    for seed in range(60):
        generator = random.Random(seed)
        made: list[Instruction] = []
        for _ in range(generator.randrange(2, 25)):
            role = generator.choice(["fusible", "unfusible", "tuple-element"]) if made else "argument"
            num = 0 if not made else 1 if role == "tuple-element" else generator.randrange(0, 3)
            made.append(Instruction("x", role, [generator.choice(made) for _ in range(num)], (1,), 4))
        results, effects = generator.sample(made, 2), generator.sample(made, generator.randrange(2))
        needed = {*results, *effects}
        for one in reversed(made):
            if one in needed:
                needed.update(one.operands)
        expected = [one for one in made if one in needed or (one.role == "tuple-element" and one.operands[0] in needed)]
        assert Body(instructions=made, results=results, effects=effects).live_instructions() == expected
        found = users(made)
        assert found == {one: [each for each in made if one in each.operands] for one in made}


def test_sizes_of_instructions():
    for shape, itemsize in itertools.product([(), (0,), (3,), (2, 5)], (1, 2, 4)):
        count = 1
        for n in shape:
            count *= n
        one = Instruction("x", "fusible", [], shape, count * itemsize)
        assert one.num_elements == count and one.itemsize == (itemsize if count else 0)
