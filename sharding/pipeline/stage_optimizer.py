"""Per-stage optimizer state and updates.

Stages are updated at different times, so to the optimizer each is a model of its own. It sees the stage's arrays with a
leading dim of 1, as slices of the stacked ones.
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
from .executors.stage_meshes import StageMeshes

if TYPE_CHECKING:
    from optax import GradientTransformation

Path = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class StageStates:
    """Mapping between the optimizer state of the model and those of its stages.

    A leaf of a stage's state corresponds to the leaf of the full state at the same path: to one row of it if it has one
    row per stage, otherwise to all of it, such as an update count or the state of the first or last stage's end.
    """

    tree: Any
    """Structure of the full state."""
    shapes: dict[Path, Any]
    """Of the full state, by path."""
    stage_shapes: tuple[Any, ...]
    """Per stage, the shapes of its state."""

    @classmethod
    def of(cls, asked: str, optimizer: GradientTransformation, params: Any, pieces: list[Any]) -> StageStates:
        """The mapping for an optimizer and the parameters of each stage (`pieces`).

        Raises:
            ShardingError: a state leaf with neither one row per stage nor one value for all.
        """
        full = jax.eval_shape(optimizer.init, params)
        found = cls(
            tree=jax.tree.structure(full),
            shapes=dict(jax.tree_util.tree_leaves_with_path(full)),
            stage_shapes=tuple(jax.eval_shape(optimizer.init, piece) for piece in pieces),
        )
        _check_stage_rows(asked, found)
        return found

    @cached_property
    def rows(self) -> tuple[Path, ...]:
        """Paths of the leaves with one row per stage."""
        one = dict(jax.tree_util.tree_leaves_with_path(self.stage_shapes[0]))
        return tuple(path for path, leaf in self.shapes.items() if path in one and one[path].shape != leaf.shape)

    def per_stage(self, state: Any, stage_meshes: StageMeshes) -> dict[int, Any]:
        """Each stage's state on its devices, as copies that may be donated."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(state))
        rows = stage_meshes.stage_params([leaves[path] for path in self.rows])
        found = {}
        for device, stage in stage_meshes.placements:
            own = dict(zip(self.rows, rows[device, stage], strict=True))
            tree = jax.tree_util.tree_map_with_path(
                lambda path, _, own=own, device=device: (
                    own[path] if path in own else stage_meshes.local_replica(leaves[path], device)
                ),
                self.stage_shapes[stage],
            )
            with jax.set_mesh(stage_meshes.meshes[device]):
                found[stage] = jax.tree.map(jnp.copy, tree)
        return found

    def combine(self, states: Mapping[int, Any], like: Any, stage_meshes: StageMeshes) -> Any:
        """The states of all stages as one, with the shardings of `like`."""
        leaves = dict(jax.tree_util.tree_leaves_with_path(like))
        own = {at: dict(jax.tree_util.tree_leaves_with_path(states[at[1]])) for at in stage_meshes.placements}
        rows = {at: [found[path] for path in self.rows] for at, found in own.items()}
        joined = dict(
            zip(self.rows, stage_meshes.stack_stages(rows, [leaves[path] for path in self.rows]), strict=True)
        )
        for path in leaves.keys() - joined.keys():
            leaf = next(found[path] for found in own.values() if path in found)
            joined[path] = stage_meshes.put_global(leaf, leaves[path])
        return jax.tree.unflatten(self.tree, [joined[path] for path in leaves])

    def check(self, asked: str, state: Any) -> None:
        """Raises unless `state` has the structure and shapes of the optimizer's state for these parameters."""
        must, fix = "the optimizer's state for these parameters", "optimizer.init(params)"
        if jax.tree.structure(state) != self.tree:
            there = [f"{jax.tree.structure(state)}", f"optimizer.init returns {self.tree}"]
            raise ShardingError(f"{asked}: opt_state", found=there, required=must, fix=fix)
        raise_together(
            asked,
            [
                ShardingError(
                    f"{asked}: opt_state/{paths.text(path)}", found=f"shape {list(jnp.shape(leaf))}", required=must
                )
                for path, leaf in jax.tree_util.tree_leaves_with_path(state)
                if jnp.shape(leaf) != self.shapes[path].shape
            ],
        )


class Update:
    """The update of one stage; preserves the shardings of its parameters and optimizer state."""

    def __init__(self, optimizer: GradientTransformation, microbatches: int, params: Any, state: Any):
        self.optimizer, self.microbatches = optimizer, microbatches
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))

    def __call__(self, params: Any, state: Any, sums: Any, *, last_use: bool) -> tuple[Any, Any]:
        """params, state, gradient sums -> params, state; donates params on their last use."""
        return (self._in_place if last_use else self._out_of_place)(params, state, sums)

    def apply(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """Applies the update for the mean gradient."""
        updates, state = self.compute_updates(params, state, sums)
        return apply_updates(params, updates), state

    def compute_updates(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """The updates to add to the parameters, and the new state."""
        gradient = jax.tree.map(lambda total: (total / self.microbatches).astype(total.dtype), sums)
        return self.optimizer.update(gradient, state, params)

    def updates_only(self, params: Any, state: Any, sums: Any) -> tuple[Any, Any]:
        """params, state, gradient sums -> updates to add to the parameters, state."""
        return self._updates_only(params, state, sums)

    @cached_property
    def _updates_only(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.compute_updates, donate_argnums=(1, 2), out_shardings=self.shardings)

    @cached_property
    def _in_place(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.apply, donate_argnums=(0, 1), out_shardings=self.shardings)

    @cached_property
    def _out_of_place(self) -> Callable[..., tuple[Any, Any]]:
        return jax.jit(self.apply, donate_argnums=(1, 2), out_shardings=self.shardings)


def apply_updates(params: Any, updates: Any) -> Any:
    """``optax.apply_updates``, imported lazily."""
    from optax import apply_updates

    return apply_updates(params, updates)


def check_independent_updates(asked: str, optimizer: GradientTransformation, piece: Any) -> None:
    """Raises if the optimizer's update of one array depends on the gradient of another.

    Checked on the jaxpr of the update of parameters in which each array appears twice.
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
                found="the update of one array depends on the gradient of another, as in clip_by_global_norm",
                required="independent updates per array: stages update at different times, on their own devices",
                fix=[
                    "an optimizer such as sgd, adam, adamw or clip",
                    "pipeline.value_and_grad with a synchronous schedule",
                ],
            )


def _check_stage_rows(asked: str, states: StageStates) -> None:
    wrong = []
    stages = len(states.stage_shapes)
    for own in states.stage_shapes:
        for path, leaf in jax.tree_util.tree_leaves_with_path(own):
            full = states.shapes.get(path)
            if full is None or full.shape not in (leaf.shape, (stages, *leaf.shape[1:])):
                there = "nothing" if full is None else f"shape {list(full.shape)}"
                there = [f"{there} for all stages", f"shape {list(leaf.shape)} for one"]
                wrong.append(ShardingError(f"{asked}: opt_state/{paths.text(path)}", found=there))
    must = "one row per stage, or one value for all"
    raise_together(asked, [ShardingError(w.asked, found=w.found, required=must) for w in wrong[:10]])
