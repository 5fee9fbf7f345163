"""Named arrays that a `jax.checkpoint` policy asks to offload, and that JAX leaves on the device without a word.

A policy moves only residuals, the arrays that a backward pass reads. A name at the end of a layer names what the next
layer gets, under another name: a scan's carry, which is saved on the device (jax-ml/jax#23869).
"""

from __future__ import annotations

from typing import Any

from ..graph import Graph


def unmoved_names(graph: Graph) -> tuple[str, ...]:
    """A line for each name that a policy of the program offloads, and of which no array is copied to the host."""
    eqns = (eqn for scope in graph.scopes() for eqn in scope.jaxpr.eqns if eqn.params.get("differentiated"))
    policies = {id(policy): policy for eqn in eqns if (policy := eqn.params.get("policy")) is not None}
    if not policies:
        return ()
    moved: dict[str, bool] = {}
    sources: dict[str, str] = {}
    for op in graph.ops:
        if op.name != "name" or not any(_offloads(policy, op.site[0]) for policy in policies.values()):
            continue
        name = op.site[0].params["name"]
        users = (use for v in op.results for use in graph.users[v])
        moved[name] = moved.get(name, False) or any(graph.changes_memory(use) for use in users)
        sources.setdefault(name, op.source)
    return tuple(
        f"{name!r} at {sources[name]}: the policy offloads it, but the backward pass doesn't read it, so it stays on "
        "the device; name the array that a layer gets (a scan's carry), not the one that it returns"
        for name, is_moved in moved.items()
        if not is_moved
    )


def _offloads(policy: Any, eqn: Any) -> bool:
    found = policy(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)
    return getattr(found, "dst", None) is not None
