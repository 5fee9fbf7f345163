"""Matrix products that share an operand."""

import random

import pytest

from sharding.cost.product_merging import MOST_BYTES, Product, merged_products, topological_order

SMALL, LARGE = MOST_BYTES // 4, 2 * MOST_BYTES


def product(lhs, rhs, *, needs=0, number=0, size=SMALL, kind="bf16"):
    return Product(
        operands=(lhs, rhs), operand_bytes=(size, size), result_bytes=size, kind=kind, needs=needs | 1 << number
    )


def test_products_of_one_array_are_merged_and_others_are_not():
    products = [product(0, 1, number=0), product(0, 2, number=1), product(3, 4, number=2), product(0, 5, number=3)]
    assert merged_products(products) == [([0, 1, 3], 0)]


def test_the_shared_operand_may_be_the_right_one_but_not_on_both_sides():
    assert merged_products([product(1, 0, number=0), product(2, 0, number=1)]) == [([0, 1], 1)]
    assert merged_products([product(0, 1, number=0), product(2, 0, number=1)]) == []


def test_other_dims_and_dependent_products_stay_apart():
    assert merged_products([product(0, 1, number=0), product(0, 2, number=1, kind="f32")]) == []
    assert merged_products([product(0, 1, number=0), product(0, 2, number=1, needs=1)]) == []


@pytest.mark.parametrize(("sizes", "count"), [((SMALL, LARGE), 1), ((LARGE, LARGE), 0)])
def test_one_of_two_products_has_to_be_small(sizes, count):
    products = [product(0, k + 1, number=k, size=size) for k, size in enumerate(sizes)]
    assert len(merged_products(products)) == count


@pytest.mark.parametrize("seed", range(30))
def test_merging_random_products_leaves_no_cycle(seed):
    r = random.Random(seed)
    needs, products = [], []
    for n in range(25):
        before = r.sample(range(n), min(n, r.randint(0, 2)))
        mask = 1 << n
        for m in before:
            mask |= needs[m]
        needs.append(mask)
        products.append(product(r.randint(0, 5), r.randint(6, 11), needs=mask, number=n))
    unit = list(range(25))
    for k, (group, side) in enumerate(merged_products(products)):
        assert len({products[n].operands[side] for n in group}) == 1
        for n in group:
            assert unit[n] == n, "a product in two groups"
            unit[n] = 25 + k
    sources = [[] for _ in range(max(unit) + 1)]
    for n in range(25):
        sources[unit[n]] += [unit[m] for m in range(n) if needs[n] >> m & 1]
    order = topological_order([sorted(set(s)) for s in sources])
    assert sorted(order) == list(range(len(sources)))


@pytest.mark.parametrize("seed", range(10))
def test_a_topological_order_keeps_what_is_already_in_order(seed):
    r = random.Random(seed)
    operands = [r.sample(range(n), min(n, 2)) for n in range(30)]
    assert topological_order(operands) == list(range(30))
    late = [[29], *([] for _ in range(28)), []]
    assert topological_order(late) == [*range(1, 30), 0]
