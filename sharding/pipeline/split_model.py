"""Splitting of a Flax NNX model into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..errors import ShardingError
from .task_table import is_integer


@dataclass(frozen=True, kw_only=True)
class Split:
    """The stage functions and parameters of a model, for ``value_and_grad``."""

    first_fn: Callable[..., Any]
    stage_fn: Callable[..., Any]
    last_fn: Callable[..., Any]
    params: dict[str, Any]
    """``"stages"``, with leaves [stages, layers per stage, ...], and the non-empty ones of ``"first"``, ``"last"`` and
    ``"shared"``."""
    sizes: tuple[int, ...]
    """Layers of each stage; smaller stages are padded with zeros that are never used."""
    merge: Callable[[dict[str, Any]], Any]
    """params -> the model."""

    def context(self, layer: Any) -> tuple[Any, ...]:
        """``value_and_grad``'s context for stages whose layers take `layer` each; with ``sliced``."""
        return (layer,) * max(self.sizes)


def split(
    model: Any,
    stages: int,
    *,
    sizes: Sequence[int] | None = None,
    inputs: Any = None,
    first: Callable[[Any, Any], Any] | None = None,
    last: Callable[[Any, Any], Any] | None = None,
    layer: Callable[..., Any] | None = None,
    layers: str = "blocks",
    sliced: bool = False,
) -> Split:
    """Splits a model of identical layers, with functions before and after them, into stages of consecutive layers.

    Args:
        model: an NNX module, or its shapes (``nnx.eval_shape``). All its variables must be parameters.
        stages: number of stages, of equal sizes; the first ones get one more layer if the layers are not divisible.
        sizes: layers per stage instead, such as ``pipeline.cut(costs, stages=stages).sizes``.
        inputs: one microbatch, or its shape, used to tell the parameters of one end from shared ones. Without it, all
            parameters of both ends are shared.
        first: (model, inputs) -> x, the computation before the layers. Default: the model's method ``before_blocks``.
        last: (model, x) -> output, the computation after them. Default: its method ``after_blocks``.
        layer: (layer, x) -> x. Default: calls the layer.
        layers: name of the attribute with the layers: a list of modules, or one module with stacked parameters.
        sliced: for schedules that slice sequences. A slice's inputs are (tokens, position of the first one), passed to
            ``before_blocks`` as two arguments; ``layer`` is (layer, x, context) -> (x, context), by default the
            layer's method ``continued``.

    Raises:
        ShardingError: a missing attribute or method, layers that differ, variables that are not parameters, or sizes
            that do not add up to the number of layers.
    """
    from flax import nnx

    asked = f"pipeline.split({type(model).__name__})"
    graph, states, stacked = _layers(asked, model, layers)
    sizes = _stage_sizes(asked, len(states), stages, sizes)
    is_even = len(set(sizes)) == 1
    if first is None:
        enter = _end_method(asked, model, "before_blocks")
        first = (lambda model, inputs: enter(model, *inputs)) if sliced else enter
    last = _end_method(asked, model, "after_blocks") if last is None else last
    outer = nnx.clone(model)
    setattr(outer, layers, nnx.List([]))
    outer_graph, outer_state, rest = nnx.split(outer, nnx.Param, ...)
    _check_only_params(asked, rest)
    ends = _Ends(nnx, outer_graph, outer_state)
    params = {
        **ends.split_params(first, last, inputs),
        "stages": _apply(_regrouped(stages), stacked)
        if stacked is not None and is_even
        else _apply(lambda states: _stacked(states, sizes), states),
    }

    def first_fn(own: Any, inputs: Any, shared: Any = None) -> Any:
        x = first(ends.model(own, shared), inputs)
        return x if is_even else (x, jnp.zeros((), jnp.int32))

    def last_fn(own: Any, y: Any, shared: Any = None) -> Any:
        return last(ends.model(own, shared), y if is_even else y[0])

    def one(state: Any, x: Any, past: Any) -> tuple[Any, Any]:
        module = nnx.merge(graph, state)
        run = layer or (type(module).continued if sliced else type(module).__call__)
        return run(module, x, past) if sliced else (run(module, x), None)

    def run(weights: Any, x: Any, context: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
        activation, stage = (x, 0) if is_even else x
        found = []
        for i, past in enumerate(context):
            args = _at(weights, i), activation, past
            if i < min(sizes):
                activation, after = one(*args)
            else:  # padding is skipped
                zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, *args)[1])
                activation, after = jax.lax.cond(
                    i < jnp.asarray(sizes)[stage], one, lambda _, activation, __, none=zeros: (activation, none), *args
                )
            found.append(after)
        return activation if is_even else (activation, stage + 1), tuple(found)

    def run_unsliced(weights: Any, x: Any) -> Any:
        return run(weights, x, (None,) * max(sizes))[0]

    def merge(params: dict[str, Any]) -> Any:
        merged = ends.model(*(params[part] for part in ("first", "last", "shared") if part in params))
        setattr(merged, layers, merge_layers(params["stages"]))
        return merged

    def merge_layers(own: Any) -> Any:
        if stacked is not None and is_even:
            return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), own))
        states = _unstacked(own, sizes)
        if stacked is not None:
            return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        return nnx.List([nnx.merge(graph, state) for state in states])

    return Split(
        first_fn=first_fn,
        stage_fn=run if sliced else run_unsliced,
        last_fn=last_fn,
        params=params,
        sizes=sizes,
        merge=merge,
    )


class _Ends:
    """The parts of a model around its layers, and which of them uses each parameter."""

    def __init__(self, nnx: Any, graph: Any, state: Any):
        self.nnx, self.graph, self.state = nnx, graph, state
        self.shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def model(self, *states: Any) -> Any:
        """The model without its layers; parameters missing from `states` are left as shapes."""
        given = [state for state in states if state is not None]
        return self.nnx.merge(self.graph, self.nnx.merge_state(self.shapes, *given))

    def split_params(
        self,
        first: Callable[[Any, Any], Any],
        last: Callable[[Any, Any], Any],
        inputs: Any,
    ) -> dict[str, Any]:
        """The parameters by user; unused ones are put into "first"."""
        if inputs is None:
            return {"shared": self.state} if jax.tree.leaves(self.state) else {}
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)

        # Layers preserve the shape of x.
        x = jax.eval_shape(lambda state, inputs: first(self.model(state), inputs), self.shapes, one)
        at_first, at_last = self._used_params(first, one), self._used_params(last, x)
        users = {"first": at_first - at_last, "last": at_last - at_first, "shared": at_first & at_last}
        users["first"] |= {path for path, _ in self.nnx.to_flat_state(self.shapes)} - at_first - at_last
        found = {
            part: self.nnx.filter_state(self.state, lambda path, _, paths=paths: path in paths)
            for part, paths in users.items()
        }
        return {part: state for part, state in found.items() if jax.tree.leaves(state)}

    def _used_params(self, end: Callable[[Any, Any], Any], x: Any) -> set[Any]:
        """Paths of the parameters that an end's output depends on."""
        leaves, tree = jax.tree.flatten((self.shapes, x))

        def run(*arrays: Any) -> list[Any]:
            state, x = jax.tree.unflatten(tree, arrays)
            return jax.tree.leaves(end(self.model(state), x))

        jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(*leaves)
        used = compat.inputs_used(jaxpr, [True] * len(outputs))
        paths = [path for path, _ in self.nnx.to_flat_state(self.shapes)]
        return {path for path, is_used in zip(paths, used, strict=False) if is_used}


def _layers(asked: str, model: Any, name: str) -> tuple[Any, list[Any], Any]:
    """The graph definition of a layer, each layer's parameters, and the stacked ones if the model stacks them."""
    from flax import nnx

    found = getattr(model, name, None)
    if found is None:
        raise ShardingError(
            asked, found=f"no attribute {name!r}", required="an attribute with the model's layers", fix="layers="
        )
    if isinstance(found, nnx.Module) and not isinstance(found, nnx.List):
        graph, state, rest = nnx.split(found, nnx.Param, ...)
        _check_only_params(asked, rest)
        num = {leaf.shape[0] for leaf in jax.tree.leaves(state)}
        return graph, [_apply(lambda state, i=i: _at(state, i), state) for i in range(num.pop())], state
    splits = [nnx.split(layer, nnx.Param, ...) for layer in found]
    for _, _, rest in splits:
        _check_only_params(asked, rest)
    graphs = [graph for graph, _, _ in splits]
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for _, state, _ in splits]
    odd = [i for i, each in enumerate(zip(graphs, shapes, strict=True)) if each != (graphs[0], shapes[0])]
    if odd:
        there = f"{name}[{odd[0]}] differs from {name}[0] in structure or shapes"
        raise ShardingError(asked, found=there, required="layers of one structure, with equal shapes")
    return graphs[0], [state for _, state, _ in splits], None


def _check_only_params(asked: str, rest: Any) -> None:
    from flax import nnx

    if found := ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        there = f"{', '.join(found[:4])}{more}, not {'a parameter' if len(found) == 1 else 'parameters'}"
        raise ShardingError(asked, found=there, required="only variables of type nnx.Param")


def _end_method(asked: str, model: Any, method: str) -> Callable[..., Any]:
    found = getattr(type(model), method, None)
    if found is None:
        what = "first" if method == "before_blocks" else "last"
        raise ShardingError(
            asked, found=f"no method {method!r}", required=f"the method or the argument {what}", fix=f"{what}="
        )
    return found


def _stage_sizes(asked: str, layers: int, stages: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        if not is_integer(stages) or not 1 <= stages <= layers:
            there = f"{layers} layers for {stages} stages"
            raise ShardingError(
                asked, found=there, required="at least one layer per stage", fix=f"stages={layers} or fewer"
            )
        return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    sizes = tuple(given)
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        there = f"sizes {sizes}: {len(sizes)} stages of {sum(sizes)} layers; the model has {layers}"
        raise ShardingError(asked, found=there, required=f"{stages} positive integers with a sum of {layers}")
    return sizes


def _stacked(states: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Leaves [stages, layers of the largest stage, ...]."""
    most = max(sizes)
    zeros = jax.tree.map(jnp.zeros_like, states[0])
    rows = [
        [*states[end - size : end], *[zeros] * (most - size)]
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    stages = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *row) for row in rows]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stages)


def _regrouped(stages: int) -> Callable[[Any], Any]:
    """[layers, ...] as [stages, layers per stage, ...]: a sharding over layers becomes one over stages."""
    return lambda tree: jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:]), tree)


def _unstacked(stages: Any, sizes: Sequence[int]) -> list[Any]:
    return [_at(_at(stages, stage), i) for stage, size in enumerate(sizes) for i in range(size)]


def _apply(make: Callable[..., Any], *args: Any) -> Any:
    """The result of a function, or its shapes if the arguments are shapes."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        return jax.eval_shape(make, *args)
    return make(*args)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
