"""An optimizer whose state is split, and what it needs of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from .. import paths
from ..annotation import annotate
from ..barrier import barrier
from ..errors import ShardingError
from .formula import check_stage
from .specs import axes_of, is_spec, mesh_sizes, report, specs, with_axis

PRIORITY = 2
"""Behind annotations of a model's own splits and of its fully sharded ones."""


class Master(NamedTuple):
    """State of an optimizer with master weights."""

    weights: Any
    """The parameters in single precision."""
    inner: Any
    """The optimizer's own, for these."""


class Sharded(optax.GradientTransformationExtraArgs):
    """An optimizer with a split state: ``init`` and ``update`` as any other's, and ``apply``."""

    how: _How

    def __new__(cls, how: _How) -> Sharded:
        """With the functions of an optimizer."""
        self = super().__new__(cls, how.init, how.update)
        self.how = how
        return self

    def apply(self, gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """New parameters and the next state; what ``update`` and ``optax.apply_updates`` would make.

        Where parameters are whole each device makes its part of the new ones, which are then gathered to where the old
        ones lie: in their precision, and with no memory for the updates.
        """
        return self.how.apply(gradients, state, params, **extra)


def shard(
    tx: optax.GradientTransformation,
    *,
    axis: str = "data",
    stage: int = 1,
    like: Any = None,
    master: bool = False,
    replicas: str | None = None,
) -> Sharded:
    """An optimizer whose state an axis splits; each device updates its part of every parameter.

    It is a `GradientTransformation` as `tx` is: inside `sharding.jit` its gradients, updates and state are annotated.
    Gradients are added up to where they are used (a reduce-scatter), updates are gathered to where the parameters are
    whole. For stage 3 the parameters are split too, by ``split``: they are gathered at each use, and again in the
    backward where that is rematerialised.

    Args:
        tx: an optax optimizer, clipping by global norm included: norms are those of whole arrays.
        axis: of the mesh; the batch is split over it, too.
        stage: 1 splits the state, 2 gradients too, 3 is for parameters that are split.
        like: a pytree of specs: how other axes split the parameters. Default: as arrays lie, open inside a trace.
        master: whether the state has the parameters in single precision, which take the updates; the parameters
            themselves, such as bfloat16, are those rounded.
        replicas: see ``specs``.

    Raises:
        ShardingError: no such stage; when it is used: no mesh in force, no such axis.

    A parameter of which no dim divides is whole on each device; a warning says which, and how many bytes that is.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), section 5.
    """
    check_stage("zero.shard", stage)
    return Sharded(_How(tx=tx, axis=axis, stage=stage, like=like, master=master, replicas=replicas))


def split(params: Any, *, axis: str = "data", like: Any = None, replicas: str | None = None) -> Any:
    """Parameters that an axis splits (stage 3), for use inside a traced step: annotated, behind a model's own splits.

    So the batch keeps the axis where both want it, and parameters are gathered. Arguments as in ``specs``, which also
    says how to place them.
    """
    return _annotated(params, specs(params, axis, 3, like=like, replicas=replicas).params)


@dataclass(frozen=True, kw_only=True)
class _How:
    """What ``shard`` got."""

    tx: optax.GradientTransformation
    axis: str
    stage: int
    like: Any
    master: bool
    replicas: str | None

    @property
    def asked(self) -> str:
        return f"zero.shard(axis={self.axis!r})"

    def init(self, params: Any) -> Any:
        found = specs(params, self.axis, self.stage, like=self.like, replicas=self.replicas)
        report(self.asked, found.whole, stacklevel=3)
        if not self.master:
            return self._placed(self.tx.init(params), params, found.state)
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), barrier(params, "forward"))
        weights = _annotated(weights, found.state)
        return Master(weights, self._placed(self.tx.init(weights), params, found.state))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Updates of whole parameters."""
        if params is None:
            raise ShardingError(f"{self.asked}.update", there="no parameters", must="they are the third argument")
        if not self.master:
            updates, state, _ = self._updates(updates, state, params, self._wanted(params), extra)
            return barrier(updates, "backward"), state
        new, state = self.apply(updates, state, params, **extra)
        # In single precision, such that the sums are the new ones.
        return jax.tree.map(lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), new, params), state

    def apply(self, gradients: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        """New parameters."""
        wanted = self._wanted(params)
        updates, state, weights = self._updates(gradients, state, params, wanted, extra)
        weights = optax.apply_updates(weights, updates)
        if self.master:
            weights = _annotated(weights, wanted)
            state = Master(weights, state)
        new = jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), weights, params)
        return barrier(_annotated(new, wanted), "backward"), state

    def _updates(self, gradients: Any, state: Any, params: Any, wanted: Any, extra: Any) -> tuple[Any, Any, Any]:
        """Each device's part of the updates, the optimizer's next state, and the weights that they are for.

        What the state asks for stays within the optimizer: parameters and gradients say themselves how they lie.
        """
        gradients = _annotated(barrier(gradients, "forward") if self.stage == 1 else gradients, wanted)
        weights = _annotated(state.weights if self.master else barrier(params, "forward"), wanted)
        state = self._placed(state.inner if self.master else state, params, wanted)
        gradients = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), gradients, weights)
        updates, state = optax.with_extra_args_support(self.tx).update(gradients, state, weights, **extra)
        return _annotated(updates, wanted), self._placed(state, params, wanted), weights

    def _wanted(self, params: Any) -> Any:
        return specs(params, self.axis, self.stage, like=self.like, replicas=self.replicas).state

    def _placed(self, state: Any, params: Any, wanted: Any) -> Any:
        """An optimizer's state: what has a parameter's name and shape as that, other arrays by their own shape."""
        sizes = mesh_sizes(self.asked, self.axis)
        shapes = dict(zip(paths.of_tree(params), map(jnp.shape, jax.tree.leaves(params)), strict=True))
        by_name = dict(zip(shapes, jax.tree.leaves(wanted, is_leaf=is_spec), strict=True))

        def place(path: Any, leaf: Any) -> Any:
            parts, shape = paths.text(path).split("/"), jnp.shape(leaf)
            name = next((end for i in range(len(parts)) if (end := "/".join(parts[i:])) in shapes), None)
            if name is not None and shapes[name] == shape:
                spec = by_name[name]
            else:
                spec = with_axis(shape, P(), self.axis, sizes)
            return leaf if spec is None else annotate(leaf, _open(spec, len(shape)), priority=PRIORITY)

        return jax.tree_util.tree_map_with_path(place, state)


def _annotated(tree: Any, wanted: Any) -> Any:
    """Each array with a spec, whose silent dims are open."""
    leaves, tree_def = jax.tree.flatten(tree)
    found = [
        annotate(leaf, _open(spec, jnp.ndim(leaf)), priority=PRIORITY)
        for leaf, spec in zip(leaves, jax.tree.leaves(wanted, is_leaf=is_spec), strict=True)
    ]
    return jax.tree.unflatten(tree_def, found)


def _open(spec: P, ndim: int) -> P:
    """At least these axes."""
    return P(*((*names, ...) if names else P.UNCONSTRAINED for names in axes_of(spec, ndim)))
