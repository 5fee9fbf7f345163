"""What the blocks under `remat.auto` keep for their backward in a plan.

With everything kept a step computes least, with nothing kept it holds least: both are planned. If the first has to be
sharded otherwise to fit, `remat.fit` chooses between them for the second, within what its shardings leave free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..completion import Completion
from ..display import Column, Table
from ..errors import ShardingError
from ..remat import fit
from ..remat.auto_policy import Choice, Group, Recorder, chosen
from ..remat.linearized_program import Key
from ..remat.policy import EVERYTHING, Policy

Policies = Mapping[Group, Policy]
COLUMNS = (Column("blocks of remat.auto"), Column("keep for their backward"))
EVERYTHING_KEPT = Policy(saved=frozenset({EVERYTHING}))


def ends(step: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Policies], Completion]:
    """The choices that compute and that hold least, none if no block of a step asks for one; and the program that was
    traced to see that."""
    recorder = Recorder()
    with chosen(recorder):
        completion = step.with_empty_cache().complete(*args, **kwargs)
    asked = recorder.asked
    return [dict.fromkeys(asked, policy) for policy in (EVERYTHING_KEPT, Policy()) if asked], completion


def tracing(policies: Policies) -> AbstractContextManager[None]:
    """The context in which a step is traced with a choice."""
    return chosen(Choice(tuple(policies.items()))) if policies else nullcontext()


def fitted(step: Any, args: Sequence[Any], memory_bytes: float) -> Policies | None:
    """The choice that makes a step fastest within a limit; None if none is found."""
    try:
        return dict(fit(step, *args, memory_bytes=memory_bytes, peak="predicted").policies)
    except ShardingError:  # where other programs lack a value that is annotated
        return None


def table(policies: Policies) -> Table:
    """What each group of blocks keeps."""
    rows = [("all" if group is None else str(group), str(policy)) for group, policy in policies.items()]
    return Table("recomputation", COLUMNS, rows)


def code(policy: Policy) -> str:
    """What a group keeps, as plain JAX where it has a word for it."""
    if EVERYTHING in policy.saved:
        return "no jax.checkpoint"
    keys = {*policy.saved, *policy.offloaded}
    if policy.snapshots or policy.offloaded or any(key[0] != "name" for key in keys):
        return str(policy)
    names = ", ".join(repr(key[1]) for key in sorted(policy.saved))
    return f"jax.checkpoint(..., policy=jax.checkpoint_policies.save_only_these_names({names}))"


def to_json(policies: Policies) -> list[Any]:
    """The choice as JSON, which `from_json` reads.

    Raises:
        ShardingError: a group that JSON does not have.
    """
    others = [group for group in policies if not isinstance(group, str | int | None)]
    if others:
        raise ShardingError(
            "Plan.save",
            found=f"blocks with policy=remat.auto[{others[0]!r}]",
            required="groups that are numbers or texts",
            fix="remat.auto[0]",
        )
    return [
        {
            "group": group,
            "saved": sorted(policy.saved, key=repr),
            "offloaded": sorted(policy.offloaded, key=repr),
            "snapshots": policy.snapshots,
        }
        for group, policy in policies.items()
    ]


def from_json(found: Sequence[Any]) -> Policies:
    """The choice that `to_json` wrote."""
    return {
        one["group"]: Policy(
            saved=frozenset(map(_key, one["saved"])),
            offloaded=frozenset(map(_key, one["offloaded"])),
            snapshots=tuple((_key(key), count) for key, count in one["snapshots"]),
        )
        for one in found
    }


def _key(found: Any) -> Key:
    """A key after JSON, which has lists for tuples."""
    return tuple(map(_key, found)) if isinstance(found, list) else found
