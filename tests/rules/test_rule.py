"""`RuleBuilder`, pointwise rules, and rules as text."""

import pytest

from sharding.rules import Flow, Kind, RuleBuilder, identity, pointwise


def test_factors_become_dims_in_the_order_they_are_added():
    builder = RuleBuilder([(8, 4)], [(2, 16)])
    builder.factor([0], [0], 2)
    builder.factor([0], [1], 4, Kind.PERMUTE)
    builder.factor([1], [1], 4, blocked=True)
    rule = builder.build(Flow.MOVE)
    assert str(rule) == "ij k -> i jk"
    assert rule.sizes == (2, 4, 4)
    assert rule.kinds == (Kind.PASS, Kind.PERMUTE, Kind.PASS)
    assert rule.blocked == {2}
    assert rule.flow is Flow.MOVE


def test_an_array_may_lack_a_factor():
    builder = RuleBuilder([(4, 6), (6, 2)], [(4, 2)])
    builder.factor([0, None], [0], 4)
    builder.factor([None, 1], [1], 2)
    builder.factor([1, 0], [None], 6, Kind.REDUCE)
    assert str(builder.build()) == "i k, k j -> i j"


def test_dims_without_a_factor_get_their_own():
    builder = RuleBuilder([(4, 6)], [(4, 5)])
    builder.factor([0], [0], 4)
    rule = builder.build()
    assert str(rule) == "i j -> i k"
    assert rule.sizes == (4, 6, 5)


def test_a_factor_of_one_is_no_minor_part():
    builder = RuleBuilder([(4,)], [(4, 1)])
    builder.factor([0], [0], 4)
    builder.factor([0], [1], 1)
    rule = builder.build()
    assert str(rule) == "i -> i j"
    assert rule.operands == (((0,),),)


def test_everywhere_leaves_scalars_out():
    builder = RuleBuilder([(4, 6), ()], [(4, 6)])
    builder.everywhere(0, 4)
    builder.everywhere(1, 6, Kind.REPLICATE, blocked=True)
    rule = builder.build()
    assert str(rule) == "i j,  -> i j"
    assert rule.kinds == (Kind.PASS, Kind.REPLICATE)
    assert rule.blocked == {1}


def test_a_factor_needs_one_dim_per_array():
    with pytest.raises(ValueError, match="zip"):
        RuleBuilder([(4,), (4,)], [(4,)]).factor([0], [0], 4)


@pytest.mark.parametrize(
    ("operands", "results", "text", "sizes"),
    [
        ([(4, 6)], [(4, 6)], "i j -> i j", (4, 6)),
        ([(4, 6), (), (4, 6)], [(4, 6)], "i j, , i j -> i j", (4, 6)),
        ([(4, 6)], [(4, 6), (4, 6)], "i j -> i j, i j", (4, 6)),
        ([(4, 6), (1, 6)], [(4, 6)], "i j, k j -> i j", (4, 6, 1)),
        ([(1, 6), (4, 1)], [(4, 6)], "k j, i l -> i j", (4, 6, 1, 1)),
        ([()], [()], " -> ", ()),
    ],
)
def test_pointwise(operands, results, text, sizes):
    rule = pointwise(operands, results)
    assert str(rule) == text
    assert rule.sizes == sizes
    assert set(rule.kinds) <= {Kind.PASS}
    assert rule.flow is Flow.ELEMENTWISE


def test_an_edge_ties_its_sources_to_its_target():
    rule = identity(2, (4, 6))
    assert str(rule) == "i j, i j -> i j"
    assert rule.flow is Flow.MOVE


def test_rules_are_values():
    assert pointwise([(4,)], [(4,)]) == pointwise([(4,)], [(4,)])
    assert hash(pointwise([(4,)], [(4,)])) == hash(pointwise([(4,)], [(4,)]))
