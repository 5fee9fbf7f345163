"""Sharding propagation rules, one per JAX primitive.

In: a primitive, its operand and result shapes and its parameters. Out: a `Rule` that maps every dim to factors.

Example:
    >>> from sharding import rules
    >>> print(rules.rule_for("transpose", [(2, 3)], [(3, 2)], {"permutation": (1, 0)}))
    j i -> i j
    >>> print(rules.pointwise([(8, 4), (8, 4)], [(8, 4)]), "|", rules.identity(1, (8, 4)))
    i j, i j -> i j | i j -> i j
    >>> print(rules.opaque([(8,)], [(8,)]))
    i -> j
    >>> rules.barrier((8,), "forward").flow
    <Flow.FORWARD: 'forward only'>
    >>> builder = rules.RuleBuilder([(8, 4)], [(8,)])
    >>> builder.factor([0], [0], 8)
    >>> builder.factor([1], [None], 4, rules.Kind.REDUCE)
    >>> print(builder.build(rules.Flow.OTHER))
    i j -> i
    >>> before = rules.version()
    >>> rules.register("my_matmul", "i k, k j -> i j")
    >>> print(rules.rule_for("my_matmul", [(8, 4), (4, 2)], [(8, 2)], {}))
    i j, j k -> i k
    >>> rules.unregister("my_matmul")
    >>> rules.version() - before
    2
"""

from .rule import Dims, Flow, Kind, Rule, RuleBuilder, Shape, opaque, pointwise
from .rule_table import CONSTANT_PRESERVING, ELEMENTWISE, MOVES, PARTITIONED_BY_ITSELF, barrier, identity, rule_for
from .user_rules import ON_SHARDS, register, unregister, version

__all__ = [
    "CONSTANT_PRESERVING",
    "ELEMENTWISE",
    "MOVES",
    "ON_SHARDS",
    "PARTITIONED_BY_ITSELF",
    "Dims",
    "Flow",
    "Kind",
    "Rule",
    "RuleBuilder",
    "Shape",
    "barrier",
    "identity",
    "opaque",
    "pointwise",
    "register",
    "rule_for",
    "unregister",
    "version",
]
