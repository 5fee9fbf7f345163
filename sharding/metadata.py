"""What the parameters of a flax nnx module say of themselves: the `out_sharding` of each `nnx.Variable`.

`nnx.with_partitioning(init, ("embed", "mlp"))` puts it there, and an optimizer's state has it from the parameters. Read
without loading flax: where flax isn't loaded there are no Variables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from . import paths
from .logical import AxisRules, axis_rules

NO_RULES = axis_rules({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What one Variable says of its array."""

    path: str
    spec: Any
    """A PartitionSpec; what else a user put there is for the reader of the spec to refuse."""
    rules: AxisRules
    """Rules of the Variable's own (its `sharding_rules`)."""


def of_leaves(tree: Any) -> list[Own | None]:
    """For each leaf of a pytree what the Variable around it says, if anything."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return [None] * len(jax.tree.leaves(tree))
    found: list[Own | None] = []
    for key_path, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        own = _own(paths.text(key_path) or "x", part.get_metadata()) if isinstance(part, nnx.Variable) else None
        found += [own] * len(jax.tree.leaves(part))
    return found


def _own(path: str, metadata: dict[str, Any]) -> Own | None:
    said, rules = metadata.get("out_sharding"), metadata.get("sharding_rules")
    if not said:
        return None
    if isinstance(said, NamedSharding):
        said = said.spec
    spec = P(*said) if isinstance(said, (tuple, list)) and not isinstance(said, P) else said
    return Own(path=path, spec=spec, rules=axis_rules(rules) if rules else NO_RULES)
