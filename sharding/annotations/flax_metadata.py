"""Sharding metadata of flax nnx modules: the `out_sharding` of each `nnx.Variable`.

`nnx.with_partitioning(init, ("embed", "mlp"))` sets it, and an optimizer's state inherits it from the parameters. Read
without importing flax: if flax is not loaded, there are no Variables.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .. import paths
from .axis_rules import AxisRules, axis_rules

NO_RULES = axis_rules({})


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableSharding:
    """The sharding metadata of one Variable."""

    path: str
    spec: Any
    """A PartitionSpec; other types are passed on, to be rejected when the spec is resolved."""
    rules: AxisRules
    """The Variable's `sharding_rules`."""


def of_leaves(tree: Any) -> list[VariableSharding | None]:
    """The sharding metadata of the Variable of each leaf, if any."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return [None] * len(jax.tree.leaves(tree))
    found: list[VariableSharding | None] = []
    for key_path, part in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        own = _sharding(paths.text(key_path) or "x", part.get_metadata()) if isinstance(part, nnx.Variable) else None
        found += [own] * len(jax.tree.leaves(part))
    return found


def _sharding(path: str, metadata: dict[str, Any]) -> VariableSharding | None:
    spec, rules = metadata.get("out_sharding"), metadata.get("sharding_rules")
    if not spec:
        return None
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    spec = P(*spec) if isinstance(spec, (tuple, list)) and not isinstance(spec, P) else spec
    return VariableSharding(path=path, spec=spec, rules=axis_rules(rules) if rules else NO_RULES)
