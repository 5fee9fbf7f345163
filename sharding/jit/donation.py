"""Which outputs reuse the sharding of a donated argument, so that the result of one step fits the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from .tracing import Traced, leaf_ranges


def outputs_reusing_donated(
    traced: Traced, avals: Sequence[Any], tree: Any, donated: Sequence[int], constrained: Sequence[bool]
) -> dict[int, int]:
    """Output leaf -> argument leaf, for subtrees of the result with the structure and shapes of a donated argument.

    Args:
        traced: the program.
        avals: of the argument leaves.
        tree: the pytree of the arguments, a tuple.
        donated: the donated arguments; each takes the first matching subtree that is still free.
        constrained: per output leaf, whether `out_shardings` constrains it.
    """
    shapes, out_shapes = [[(a.shape, a.dtype) for a in list_] for list_ in (avals, traced.out_avals)]
    subtrees = list(_subtrees(jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))))
    found: dict[int, int] = {}
    for i in donated:
        leaves, structure = leaf_ranges(tree)[i], tree.children()[i]
        required = [shapes[k] for k in leaves]
        for subtree, outs in subtrees:
            free = not any(o in found or constrained[o] for o in outs)
            if outs and free and subtree == structure and [out_shapes[o] for o in outs] == required:
                found.update(zip(outs, leaves, strict=True))
                break
    return found


def _subtrees(result: Any) -> Iterator[tuple[Any, list[int]]]:
    """(structure, leaves) of the result and of all its subtrees, outermost first."""
    yield jax.tree.structure(result), jax.tree.leaves(result)
    children = jax.tree.leaves(result, is_leaf=lambda x: x is not result)
    for child in children:
        if child is not result:
            yield from _subtrees(child)
