"""The users' own rules: for their primitives, their Pallas kernels and foreign functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import ShardingError
from . import notation
from .rule import Rule, Shape

MakeRule = Callable[[Sequence[Shape], Sequence[Shape], Mapping[str, Any]], "Rule | str | None"]
"""(operand shapes, result shapes, the equation's parameters) -> its rule, also as text; None stops the flow."""

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
    """Says how the dims of a primitive's operands and results belong together; later calls replace earlier ones.

    Args:
        primitive: its name, or the primitive itself.
        rule: `"b i k, k j -> b i j"` (see `notation.py`), or a function (operand shapes, result shapes, parameters) ->
            such a text, a `Rule`, or None where nothing flows.
        kernel: of `pallas_call` the kernel's name, of `ffi_call` the target's: the rule is for that one alone.
        reduction: factors whose split leaves partial results to be summed; by default those that no result has.
        permutation: factors whose split makes neighbours exchange borders.
        need_replication: factors that have to be whole inside the op.
        sizes: the sizes of factors that occur in products only.

    The rule says what XLA can do with the op when it is split; that it does is up to the op's lowering.

    Raises:
        ShardingError: a text that is no rule.
    """
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise ShardingError(
            f"rules.register({primitive!r}, ...)", must="a primitive or its name", fix='rules.register("my_prim", ...)'
        )
    if kernel is not None and name not in KERNELS:
        raise ShardingError(
            f"rules.register({name!r}, kernel={kernel!r})",
            must=f"kernels have names under {' and '.join(KERNELS)}",
            fix=[f'rules.register("{known}", ..., kernel="{kernel}")' for known in KERNELS],
        )
    if isinstance(rule, str):
        parsed = notation.parse(
            rule, reduction=reduction, permutation=permutation, need_replication=need_replication, sizes=sizes
        )
        make: MakeRule = lambda ins, outs, _: parsed.rule(ins, outs)  # noqa: E731
    elif callable(rule):
        make = rule
    else:
        raise ShardingError(
            f"rules.register({name!r}, {rule!r})", must="a rule as text or a function", fix='"b i k, k j -> b i j"'
        )
    _TABLE[name, kernel] = make
    _CHANGES[0] += 1


def unregister(primitive: Any, *, kernel: str | None = None) -> None:
    """Forgets what was registered for a primitive; nothing happens where there was nothing."""
    _TABLE.pop((getattr(primitive, "name", primitive), kernel), None)
    _CHANGES[0] += 1


def version() -> int:
    """How often the table has changed: part of what a completed program depends on."""
    return _CHANGES[0]


def has(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether a user has said how an equation's dims belong together."""
    return _find(primitive, params) is not None


def rule_for(primitive: str, ins: Sequence[Shape], outs: Sequence[Shape], params: Mapping[str, Any]) -> Rule | None:
    """The registered rule of an equation at its shapes."""
    make = _find(primitive, params)
    assert make is not None
    rule = make(ins, outs, params)
    return notation.parse(rule).rule(ins, outs) if isinstance(rule, str) else rule


KERNELS = {"pallas_call": "name", "ffi_call": "target_name"}
"""Primitives that stand for many kernels, and the parameter with the kernel's name."""


def _find(primitive: str, params: Mapping[str, Any]) -> MakeRule | None:
    if not _TABLE:
        return None
    kernel = _kernel(primitive, params)
    return _TABLE.get((primitive, kernel)) or _TABLE.get((primitive, None))


def _kernel(primitive: str, params: Mapping[str, Any]) -> str | None:
    if primitive not in KERNELS:
        return None
    found = params.get(KERNELS[primitive], params.get("name_and_src_info"))
    return found if found is None or isinstance(found, str) else getattr(found, "name", str(found))
