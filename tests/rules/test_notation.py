"""Text notation of rules: the rules at given shapes, and malformed text."""

import pytest

from sharding import ShardingError
from sharding.rules import Kind
from sharding.rules.notation import parse


@pytest.mark.parametrize(
    "text, ins, outs, expected",
    [
        ("b i k, b k j -> b i j", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], "i j k, i k l -> i j l"),
        ("i, -> i", [(4,), ()], [(4,)], "i,  -> i"),
        ("(h d) s -> s h d", [(12, 5)], [(5, 4, 3)], "ij k -> k i j"),
        ("... i -> ...", [(2, 3, 4)], [(2, 3)], "i j k -> i j"),
        ("... i, i j -> ... j", [(4,), (4, 5)], [(5,)], "i, i j -> j"),
        ("..., ... -> ...", [(2, 3), (3,)], [(2, 3)], "i j, j -> i j"),
        ("i 1 -> 1 i", [(4, 1)], [(7, 4)], "i j -> k i"),
        ("-> i", [], [(4,)], " -> i"),
    ],
)
def test_at_shapes(text, ins, outs, expected):
    assert str(parse(text).rule(ins, outs)) == expected


def test_sizes_in_products_follow_from_single_factors_or_are_given():
    rule = parse("(i j) -> i j").rule([(12,)], [(4, 3)])
    assert rule.sizes == (4, 3)
    assert parse("(i j) -> (i j)", sizes={"i": 4}).rule([(12,)], [(12,)]).sizes == (4, 3)


def test_kinds():
    rule = parse("i k s, k j -> i j s", permutation=["s"], need_replication=["j"]).rule(
        [(2, 3, 4), (3, 5)], [(2, 5, 4)]
    )
    kinds = dict(zip("iksj", rule.kinds, strict=True))
    assert kinds == {"i": Kind.PASS, "k": Kind.REDUCE, "s": Kind.PERMUTE, "j": Kind.REPLICATE}
    assert rule.blocked == {3}


@pytest.mark.parametrize(
    "text, options, complaints",
    [
        ("i j", {}, ["0 arrows"]),
        ("i -> j -> k", {}, ["2 arrows"]),
        ("i i -> i", {}, ["'i' twice in 'i i'"]),
        ("i $ -> i", {}, ["'\\$'", "factors that are names"]),
        ("i ... -> i", {}, ["\\.\\.\\. after 'i'"]),
        ("i j -> j", {"reduction": ["k"]}, ["reduction factor 'k'", "i, j"]),
        ("i j -> j", {"reduction": ["i"], "permutation": ["i"]}, ["'i' is reduction and permutation"]),
        ("i -> i", {"sizes": {"i": 0, "z": 2}}, ["size i=0", "size z=2"]),
        ("i i -> $", {}, ["'i' twice", "factors that are names"]),
    ],
)
def test_malformed(text, options, complaints):
    for complaint in complaints:
        with pytest.raises(ShardingError, match=complaint):
            parse(text, **options)


@pytest.mark.parametrize(
    "text, ins, outs, complaint",
    [
        ("i, i -> i", [(4,)], [(4,)], "1 operands, the rule has 2"),
        ("i j -> i", [(4,)], [(4,)], "operand 0 has 1 dims \\(4,\\), the rule has 2"),
        ("... i -> i", [()], [(4,)], "operand 0 has 0 dims"),
        ("i k, k j -> i j", [(2, 3), (4, 5)], [(2, 5)], "k=3, but the dim has 4"),
        ("(i j), i, j -> i", [(12,), (4,), (4,)], [(4,)], "i=4 \\* j=4 = 16, but the dim has 12"),
        ("(i j) -> (i j)", [(12,)], [(12,)], "unknown sizes of factors i, j"),
        ("(i j) -> i", [(12,)], [(5,)], "i=5 does not divide a dim of 12"),
    ],
)
def test_shapes_that_do_not_fit(text, ins, outs, complaint):
    with pytest.raises(ShardingError, match=complaint):
        parse(text).rule(ins, outs)
