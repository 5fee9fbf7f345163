"""An optax optimizer with sharded state (ZeRO): reduce-scattered gradients, sharded update, gathered parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from ..annotations.annotate import annotate
from ..annotations.propagation_barrier import barrier
from ..errors import ShardingError
from ..mesh import platform
from . import host_state
from .delayed_update import Delayed, delayed, select
from .memory_formula import check_stage
from .state_specs import Specs, axes_of, found_specs, is_spec, leaf_specs, mesh_sizes, report_replicated
from .streamed_update import streamed

Offload = Literal["host"]

PRIORITY = 2
"""Lower priority than a model's own annotations (0) and its FSDP annotations (1)."""


class Master(NamedTuple):
    """Optimizer state with master weights."""

    weights: Any
    """The parameters in float32."""
    inner: Any
    """The wrapped optimizer's state for the master weights."""


class Sharded(optax.GradientTransformationExtraArgs):
    """An optax optimizer with sharded state: the usual ``init`` and ``update``, and ``apply``."""

    transform: _ShardedTransform

    def __new__(cls, transform: _ShardedTransform) -> Sharded:
        self = super().__new__(cls, transform.init, transform.update)
        self.transform = transform
        return self

    def apply(
        self, gradients: Any, state: Any, params: Any, *, only_if: jax.Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        """New parameters and the next state, equal to ``update`` followed by ``optax.apply_updates``.

        With replicated parameters each device computes its shard of the new ones, which are then all-gathered in their
        own dtype, without memory for the updates. On TPUs it gathers the updates, unless there are master weights: XLA
        copies what a program gathers last. Where the scalar `only_if` is false, both stay as they are.
        """
        return self.transform.apply(gradients, state, params, only_if, **extra)


def shard(
    tx: optax.GradientTransformation,
    *,
    axis: str = "data",
    stage: int = 1,
    like: Any = None,
    master: bool = False,
    offload: Offload | None = None,
    delay_after: int | None = None,
    replicas: str | None = None,
    strict: bool = False,
) -> Sharded:
    """An optimizer with its state sharded over an axis; each device updates its shard of every parameter.

    The result is a `GradientTransformation` like `tx`: inside `sharding.jit` it annotates gradients, updates and state.
    Gradients are reduce-scattered; updates are all-gathered where the parameters are replicated. In stage 3 ``split``
    shards the parameters too: they are all-gathered at each use, and again in a rematerialised backward pass.

    Args:
        tx: an optax optimizer, including clipping by global norm: norms are of global arrays.
        axis: mesh axis that the batch is sharded over, too.
        stage: 1 shards the state, 2 gradients too, 3 is for sharded parameters.
        like: a pytree of specs of the parameters over other axes. Default: the arrays' own shardings, unconstrained
            inside a trace.
        master: whether the state keeps float32 master weights, which take the updates; the parameters, such as
            bfloat16, are rounded from them.
        offload: ``"host"`` keeps the state's arrays, master weights among them, in the host's memory. An update reads
            and writes them parameter by parameter; at most two are on the device. Donate the state.
        delay_after: steps of warm-up before ZeRO-Offload's delayed update, in which a step applies the gradient of the
            step before it; the step behind the warm-up applies none. 0 delays from the first step on, and then an
            update runs independently of its step's gradient; the state fits both. None: no delay.
        replicas: see ``specs``.
        strict: see ``specs``.

    Raises:
        ShardingError: no such stage, offload or delay; when used, no mesh in context or no such axis, or devices that
            don't reach the host's memory; under `strict`, parameters that stay replicated.

    A parameter without a divisible dim stays replicated; a warning lists these with their bytes.

    References:
        Rajbhandari et al., ZeRO, SC 2020 (1910.02054), section 5; Ren et al., ZeRO-Offload, USENIX ATC 2021
        (2101.06840), sections 4 and 5.2.
    """
    check_stage("zero.shard", stage)
    if offload not in (None, "host"):
        outside = "zero.DiskOptimizer, which runs outside jit" if offload == "disk" else ()
        raise ShardingError("zero.shard(offload)", found=repr(offload), required="'host' or None", fix=outside)
    is_count = isinstance(delay_after, int) and not isinstance(delay_after, bool) and delay_after >= 0
    if delay_after is not None and not is_count:
        raise ShardingError(
            "zero.shard(delay_after)", found=repr(delay_after), required="a number of steps, at least 0, or None"
        )
    options = _ShardedTransform(
        tx=tx,
        axis=axis,
        stage=stage,
        like=like,
        master=master,
        offload=offload,
        delay_after=delay_after,
        replicas=replicas,
        strict=strict,
    )
    return Sharded(options)


def split(
    params: Any, *, axis: str = "data", like: Any = None, replicas: str | None = None, strict: bool = False
) -> Any:
    """Parameters annotated as sharded over an axis (stage 3), for use inside a traced step.

    The annotations have lower priority than a model's own, so on a conflict the batch keeps the axis and parameters are
    all-gathered. Arguments as in ``specs``, which also gives the specs to place them with.
    """
    asked = f"zero.split(axis={axis!r})"
    found = found_specs(params, axis, 3, like, mesh_sizes(asked, axis, replicas), asked=asked)
    report_replicated(asked, found.whole, strict=strict)
    return _annotate(params, found.params)


@dataclass(frozen=True, kw_only=True)
class _ShardedTransform:
    """Implementation of ``Sharded``, with the arguments of ``shard``."""

    tx: optax.GradientTransformation
    axis: str
    stage: int
    like: Any
    master: bool
    offload: Offload | None
    delay_after: int | None
    replicas: str | None
    strict: bool

    @property
    def asked(self) -> str:
        return f"zero.shard(axis={self.axis!r})"

    def init(self, params: Any) -> Any:
        if self.offload is not None:
            host_state.check(f"zero.shard(offload={self.offload!r})")
        found = self._specs(params)
        report_replicated(self.asked, found.whole, strict=self.strict)
        state = self._initial(params, found.state)
        if self.delay_after is not None:
            pending = _annotate(jax.tree.map(jnp.zeros_like, barrier(params, "forward")), found.state)
            state = Delayed(jnp.zeros((), jnp.int32), pending, state)
        return state if self.offload is None else host_state.stored(state)

    def _initial(self, params: Any, state_specs: Any) -> Any:
        if not self.master:
            return self._annotate_state(self.tx.init(params), params, state_specs)
        weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), barrier(params, "forward"))
        weights = _annotate(weights, state_specs)
        return Master(weights, self._annotate_state(self.tx.init(weights), params, state_specs))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Updates and the next state."""
        if params is None:
            raise ShardingError(f"{self.asked}.update", found="no parameters", required="params as the third argument")
        dtypes = jax.tree.map(lambda leaf: jnp.float32 if self.master else leaf.dtype, params)
        zeros = jax.tree.map(jnp.zeros_like, params, dtypes)
        return self._run(self._update, updates, state, params, extra, unchanged=zeros)

    def apply(
        self, gradients: Any, state: Any, params: Any, only_if: jax.Array | None, **extra: Any
    ) -> tuple[Any, Any]:
        """New parameters and the next state."""
        return self._run(self._apply, gradients, state, params, extra, unchanged=params, only_if=only_if)

    def _run(
        self,
        update: Callable[[Any, Any, Any, dict[str, Any]], tuple[Any, Any]],
        gradients: Any,
        state: Any,
        params: Any,
        extra: dict[str, Any],
        *,
        unchanged: Any,
        only_if: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        """What `update` gives: delayed, only on a condition, and with the state in the host's memory, where asked."""

        def now(gradients: Any, state: Any) -> tuple[Any, Any]:
            return update(gradients, state, params, extra)

        def step(state: Any) -> tuple[Any, Any]:
            before = state if self.offload is None else host_state.fetched(state)
            if self.delay_after is None:
                new, after = now(gradients, before)
            else:
                specs = self._state_specs(params)
                waiting = before._replace(pending=_annotate(before.pending, specs))
                new, after = delayed(now, self.delay_after, self._scattered(gradients, specs), waiting, unchanged)
            if only_if is not None:
                new, after = select(only_if, (new, after), (unchanged, before))
            return new, after if self.offload is None else host_state.stored(after)

        if self.offload is None:
            return step(state)
        host_state.check(f"zero.shard(offload={self.offload!r})")
        return streamed(step, state)

    def _update(self, gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if not self.master:
            updates, state, _ = self._updates(gradients, state, params, self._state_specs(params), extra)
            return barrier(updates, "backward"), state
        new, state = self._apply(gradients, state, params, extra)
        # In float32, so that adding them gives exactly the new parameters.
        return jax.tree.map(lambda new, old: new.astype(jnp.float32) - old.astype(jnp.float32), new, params), state

    def _apply(self, gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        state_specs = self._state_specs(params)
        updates, state, weights = self._updates(gradients, state, params, state_specs, extra)
        if not self.master and platform() == "tpu":
            return optax.apply_updates(params, barrier(updates, "backward")), state
        weights = optax.apply_updates(weights, updates)
        if self.master:
            weights = _annotate(weights, state_specs)
            state = Master(weights, state)
        new = jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), weights, params)
        return barrier(_annotate(new, state_specs), "backward"), state

    def _updates(self, gradients: Any, state: Any, params: Any, state_specs: Any, extra: Any) -> tuple[Any, Any, Any]:
        """Sharded updates, the optimizer's next state, and the weights to update.

        The barriers keep the state's sharding inside the optimizer: it does not propagate to parameters and gradients.
        """
        gradients = self._scattered(gradients, state_specs)
        weights = _annotate(state.weights if self.master else barrier(params, "forward"), state_specs)
        state = self._annotate_state(state.inner if self.master else state, params, state_specs)
        gradients = jax.tree.map(lambda leaf, weight: leaf.astype(weight.dtype), gradients, weights)
        updates, state = optax.with_extra_args_support(self.tx).update(gradients, state, weights, **extra)
        return _annotate(updates, state_specs), self._annotate_state(state, params, state_specs), weights

    def _scattered(self, gradients: Any, state_specs: Any) -> Any:
        """The gradients sharded as the state; in stage 1 without sharding those that the backward pass computes."""
        return _annotate(barrier(gradients, "forward") if self.stage == 1 else gradients, state_specs)

    def _state_specs(self, params: Any) -> Any:
        return self._specs(params).state

    def _specs(self, params: Any) -> Specs:
        sizes = mesh_sizes(self.asked, self.axis, self.replicas)
        return found_specs(params, self.axis, self.stage, self.like, sizes, asked=self.asked)

    def _annotate_state(self, state: Any, params: Any, state_specs: Any) -> Any:
        found = leaf_specs(state, params, state_specs, self.axis, mesh_sizes(self.asked, self.axis))
        leaves, tree_def = jax.tree.flatten(state)
        pairs = zip(leaves, found, strict=True)
        return jax.tree.unflatten(tree_def, [leaf if spec is None else _at_least(leaf, spec) for leaf, spec in pairs])


def _annotate(tree: Any, specs: Any) -> Any:
    """Each array annotated with at least the axes of its spec."""
    leaves, tree_def = jax.tree.flatten(tree)
    pairs = zip(leaves, jax.tree.leaves(specs, is_leaf=is_spec), strict=True)
    return jax.tree.unflatten(tree_def, [_at_least(leaf, spec) for leaf, spec in pairs])


def _at_least(leaf: Any, spec: P) -> Any:
    """The array annotated with the spec opened in every dim, so that it has at least these axes."""
    opened = P(*((*names, ...) if names else P.UNCONSTRAINED for names in axes_of(spec, jnp.ndim(leaf))))
    return annotate(leaf, opened, priority=PRIORITY)
