"""User-registered factor rules for custom primitives, Pallas kernels and FFI calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import compat
from ..errors import ShardingError
from . import notation
from .kernel_grid import on_grid
from .rule import Rule, Shape

MakeRule = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], "Rule | notation.Notation | str | None"]
"""(operand shapes, result shapes, equation parameters) -> a rule or its text; None stops propagation."""

_TABLE: dict[tuple[str, str | None], MakeRule] = {}
_CHANGES = [0]


def register(
    primitive: Any,
    rule: str | MakeRule,
    *,
    kernel: str | None = None,
    reduction: Iterable[str] = (),
    permutation: Iterable[str] = (),
    need_replication: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Registers the factor rule of a primitive, replacing any earlier one.

    Args:
        primitive: the primitive or its name.
        rule: `"b i k, k j -> b i j"` (see `notation.py`), or a function (operand shapes, result shapes, parameters)
            that returns such a text, a `Rule`, or None to stop propagation.
        kernel: name of a `pallas_call` (by default that of the kernel's function) or target name of an `ffi_call`
            that the rule is limited to.
        reduction: factors that leave partial sums when sharded; by default those that no result has.
        permutation: factors along which neighbours exchange halos when sharded.
        need_replication: factors that must be replicated inside the op.
        sizes: sizes of factors that occur in products only.

    The rule states what XLA may do with the sharded op; the op's lowering must implement it.

    Raises:
        ShardingError: malformed rule text.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise ShardingError(
            f"rules.register({primitive!r}, ...)",
            required="a primitive or its name",
            fix='rules.register("my_prim", ...)',
        )
    if kernel is not None and name not in KERNELS:
        raise ShardingError(
            f"rules.register({name!r}, kernel={kernel!r})",
            required=f"`kernel` is for {' and '.join(KERNELS)} only",
            fix=[f'rules.register("{known}", ..., kernel="{kernel}")' for known in KERNELS],
        )
    if isinstance(rule, str):
        parsed = notation.parse(
            rule, reduction=reduction, permutation=permutation, need_replication=need_replication, sizes=sizes
        )
        make: MakeRule = lambda *_: parsed  # noqa: E731
    elif callable(rule):
        make = rule
    else:
        raise ShardingError(
            f"rules.register({name!r}, {rule!r})", required="a rule as text or a function", fix='"b i k, k j -> b i j"'
        )
    _TABLE[name, kernel] = make
    _CHANGES[0] += 1


def unregister(primitive: Any, *, kernel: str | None = None) -> None:
    """Removes the registered rule of a primitive, if any."""
    _TABLE.pop((getattr(primitive, "name", primitive), kernel), None)
    _CHANGES[0] += 1


def version() -> int:
    """Returns the number of changes to the table, which is part of the cache key of a completed program."""
    return _CHANGES[0]


def has(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether a user rule is registered for an equation."""
    return _find(primitive, params) is not None


def rule_for(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """Returns the registered rule of an equation at its shapes."""
    make = _find(primitive, params)
    assert make is not None
    rule = make(ins, outs, params)
    parsed = notation.parse(rule) if isinstance(rule, str) else rule
    if isinstance(parsed, notation.Notation):
        found = (parsed.at(ins, outs) if primitive in ON_SHARDS else parsed).rule(ins, outs)
    else:
        found = parsed
    return on_grid(found, params) if found is not None and primitive == "pallas_call" else found


ON_SHARDS = frozenset(
    """
    all_gather all_gather_invariant all_to_all dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper
    eigh ffi_call kernel_call lu pallas_call reduce_scatter svd top_k
    """.split()
)
"""Primitives that XLA's partitioner runs on replicated arrays; those with a rule run on shards, in a `shard_map`."""

KERNELS = {"pallas_call": "name", "ffi_call": "target_name"}
"""Primitives that wrap many kernels, and the parameter that holds the kernel's name."""


def _find(primitive: str, params: Mapping[str, Any]) -> MakeRule | None:
    if not _TABLE:
        return None
    kernel = _kernel(primitive, params)
    return _TABLE.get((primitive, kernel)) or _TABLE.get((primitive, None))


def _kernel(primitive: str, params: Mapping[str, Any]) -> str | None:
    found = params.get(KERNELS[primitive]) if primitive in KERNELS else None
    if found is None and primitive == "pallas_call":  # a kernel without a name goes by its function's
        return compat.open_jaxpr(params["jaxpr"]).debug_info.func_name
    return found
