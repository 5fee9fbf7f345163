"""An optimizer stage by stage: what each stage has of its state, and the update of one stage on its device.

Stages are updated at different times. So each is a model of its own to the optimizer, which sees its arrays with a
leading dim of 1, as they are cut out of those of all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .. import compat, paths
from ..errors import ShardingError, raise_together
from .executors.parts import Parts

if TYPE_CHECKING:
    from optax import GradientTransformation

Path = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """Which leaves of an optimizer's state each stage has.

    A leaf of a stage's state is found in that of the whole by its path: a row of it where it has a row per stage, else
    all of it, such as a count of updates or what is of the first or last stage's own parameters.
    """

    tree: Any
    """That of the whole state."""
    shapes: dict[Path, Any]
    """Of the whole state."""
    of_stages: tuple[Any, ...]
    """Per stage the shapes of its state."""

    @classmethod
    def of(cls, asked: str, optimizer: GradientTransformation, params: Any, pieces: list[Any]) -> States:
        """Those of an optimizer of parameters of which each stage has a piece.

        Raises:
            ShardingError: a state that is not one row per stage, or one thing for all.
        """
        whole = jax.eval_shape(optimizer.init, params)
        found = cls(
            tree=jax.tree.structure(whole),
            shapes=dict(jax.tree_util.tree_leaves_with_path(whole)),
            of_stages=tuple(jax.eval_shape(optimizer.init, piece) for piece in pieces),
        )
        _cut_by_stages(asked, found)
        return found

    @cached_property
    def rows(self) -> tuple[Path, ...]:
        """The leaves with a row per stage."""
        one = dict(jax.tree_util.tree_leaves_with_path(self.of_stages[0]))
        return tuple(path for path, leaf in self.shapes.items() if path in one and one[path].shape != leaf.shape)

    def cut(self, state: Any, parts: Parts) -> dict[int, Any]:
        """Each stage's state on its device, as copies that may be changed in place."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(state))
        rows = parts.stages([leaves[path] for path in self.rows])
        found = {}
        for device, stage in parts.places:
            own = dict(zip(self.rows, rows[device, stage], strict=True))
            tree = jax.tree_util.tree_map_with_path(
                lambda path, _, own=own, device=device: (
                    own[path] if path in own else parts.replica(leaves[path], device)
                ),
                self.of_stages[stage],
            )
            with jax.set_mesh(parts.meshes[device]):
                found[stage] = jax.tree.map(jnp.copy, tree)
        return found

    def joined(self, states: Mapping[int, Any], like: Any, parts: Parts) -> Any:
        """The states of all stages as one, which lies as `like` does."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(like))
        own = {at: dict(jax.tree_util.tree_leaves_with_path(states[at[1]])) for at in parts.places}
        rows = {at: [found[path] for path in self.rows] for at, found in own.items()}
        joined = dict(zip(self.rows, parts.joined(rows, [leaves[path] for path in self.rows]), strict=True))
        for path in leaves.keys() - joined.keys():
            leaf = next(found[path] for found in own.values() if path in found)
            joined[path] = parts.placed(leaf, leaves[path])
        return jax.tree.unflatten(self.tree, [joined[path] for path in leaves])

    def check(self, asked: str, state: Any) -> None:
        """Raises where a state is not the optimizer's for these parameters."""
        must, fix = "the optimizer's state for these parameters", "optimizer.init(params)"
        if jax.tree.structure(state) != self.tree:
            there = [f"it is {jax.tree.structure(state)}", f"optimizer.init gives {self.tree}"]
            raise ShardingError(f"{asked}: opt_state", there=there, must=must, fix=fix)
        raise_together(
            asked,
            [
                ShardingError(
                    f"{asked}: opt_state/{paths.text(path)}", there=f"shape {list(jnp.shape(leaf))}", must=must
                )
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
                if jnp.shape(leaf) != self.shapes[path].shape
            ],
        )


class Update:
    """The update of one stage, which gives its parameters and its state of the optimizer as they lay before."""

    def __init__(self, optimizer: GradientTransformation, microbatches: int, params: Any, state: Any):
        self.optimizer, self.microbatches = optimizer, microbatches
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    def __call__(self, params: Any, state: Any, sums: Any, *, last_use: bool) -> tuple[Any, Any]:
        """params, state, sums of gradients -> params, state; in place of params where that is their last use."""
        return (self._in_place if last_use else self._beside)(params, state, sums)

    def run(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """The update by the mean gradient."""
        updates, state = self.updates(params, state, sums)
        return applied(params, updates), state

    def updates(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """What is added to the parameters, and the state."""
        gradient = jax.tree.map(lambda total: (total / self.microbatches).astype(total.dtype), sums)
        return self.optimizer.update(gradient, state, params)

    def apart(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """params, state, sums of gradients -> what is added to the parameters, state."""
        return self._apart(params, state, sums)

    @cached_property
    def _apart(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.updates, donate_argnums=(1, 2), out_shardings=self.shardings)

    @cached_property
    def _in_place(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.run, donate_argnums=(0, 1), out_shardings=self.shardings)

    @cached_property
    def _beside(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.run, donate_argnums=(1, 2), out_shardings=self.shardings)


def applied(params: Any, updates: Any) -> Any:
    """The parameters with what is added to them."""
    from optax import apply_updates

    return apply_updates(params, updates)


def each_by_itself(asked: str, optimizer: GradientTransformation, piece: Any) -> None:
    """Raises where the optimizer's update of one array depends on the gradient of another.

    Looked for in the traced update of parameters in which each array is there twice.
    """
    twice = jax.tree.map(lambda leaf: (leaf, leaf), piece)
    state = jax.eval_shape(optimizer.init, twice)
    jaxpr, shapes = jax.make_jaxpr(optimizer.update, return_shape=True)(twice, state, twice)
    count, count_state = len(jax.tree.leaves(twice)), len(jax.tree.leaves(state))
    sides = [*([0, 1] * (count // 2)), *([None] * count_state), *([0, 1] * (count // 2))]
    total = len(jax.tree.leaves(shapes))
    for output in range(total):
        used = compat.inputs_used(jaxpr, [number == output for number in range(total)])
        if {0, 1} <= {side for side, is_used in zip(sides, used, strict=True) if is_used}:
            raise ShardingError(
                f"{asked}(optimizer)",
                there="its update of one array depends on the gradient of another, as clip_by_global_norm's does",
                must="each array is updated by itself: stages are updated at different times, each on its own device",
                fix=[
                    "such an optimizer: sgd, adam, adamw, clip, ...",
                    "pipeline.value_and_grad and a flushed schedule",
                ],
            )


def _cut_by_stages(asked: str, states: States) -> None:
    wrong = []
    stages = len(states.of_stages)
    for own in states.of_stages:
        for path, leaf in jax.tree_util.tree_leaves_with_path(own):
            whole = states.shapes.get(path)
            if whole is None or whole.shape not in (leaf.shape, (stages, *leaf.shape[1:])):
                there = "nothing" if whole is None else f"shape {list(whole.shape)}"
                there = [f"{there} for all stages", f"shape {list(leaf.shape)} for one"]
                wrong.append(ShardingError(f"{asked}: opt_state/{paths.text(path)}", there=there))
    must = "the optimizer's state has a row per stage, or one thing for all"
    raise_together(asked, [ShardingError(w.asked, there=w.there, must=must) for w in wrong[:10]])
