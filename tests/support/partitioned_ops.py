"""Ops that choose by a `custom_partitioning` how they are sharded."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning


def elementwise(f: Callable[[jax.Array], jax.Array], rule: Any) -> Any:
    """An elementwise function as such an op, with a sharding rule or a function that returns one."""
    op = custom_partitioning(lambda x: f(x))
    op.def_partition(
        infer_sharding_from_operands=lambda mesh, operands, result: operands[0].sharding,
        partition=lambda mesh, operands, result: (mesh, f, operands[0].sharding, (operands[0].sharding,)),
        sharding_rule=rule,
    )
    return op
