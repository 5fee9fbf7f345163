"""The sharding rule of a `jax.experimental.custom_partitioning`, as given to its `def_partition`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.mlir import ir
from jax.interpreters import mlir

from . import notation
from .rule import Rule, Shape


def partitioning_rule(ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The rule of a `custom_partitioning` equation; None if it has none, or a function of it asks for devices."""
    given = params.get("sharding_rule")
    if callable(given):
        given = _returned(given, params)
    return None if given is None else notation.from_sdy(given).rule(ins, outs)


def _returned(function: Callable[..., Any], params: Mapping[str, Any]) -> SdyShardingRule | None:
    """What a function of (static arguments, mesh, types of operands, types of results) returns."""
    call, mesh = params["call"], jax.sharding.get_abstract_mesh()
    with mlir.make_ir_context(), ir.Location.unknown():
        types = [*map(_types, (call.in_avals, call.out_avals))]
        try:
            found = function(*params["static_args"], mesh, *types)
        except Exception:  # whatever a package raises on a mesh without devices, and on no mesh
            return None
    text, options = found if isinstance(found, (list, tuple)) else (found, {})
    return _parsed(text, options) if isinstance(text, str) else text


def _types(avals: Sequence[Any]) -> list[Any]:
    return [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype))) for aval in avals]


def _parsed(text: str, options: Mapping[str, Any]) -> SdyShardingRule:
    """A rule in JAX's notation, which `def_partition` parses."""
    holder: Any = custom_partitioning(lambda: None)
    holder.def_partition(partition=lambda *_: None, sharding_rule=text, **options)
    return holder.sharding_rule
