"""A flax nnx model as the stages of a pipeline: functions, and parameters in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat
from ..errors import ShardingError
from .table import is_count


@dataclass(frozen=True, kw_only=True)
class Split:
    """What ``value_and_grad`` takes of a model."""

    first_fn: Callable[..., Any]
    stage_fn: Callable[..., Any]
    last_fn: Callable[..., Any]
    params: dict[str, Any]
    """``"stages"``, with leaves [stages, layers of a stage, ...], and of ``"first"``, ``"last"``, ``"shared"`` those
    that there are."""
    sizes: tuple[int, ...]
    """How many layers each stage has; behind the last one of a smaller stage are zeros that nothing uses."""
    merge: Callable[[dict[str, Any]], Any]
    """params -> the model."""

    def context(self, layer: Any) -> tuple[Any, ...]:
        """``value_and_grad``'s for stages of layers that get such a one each; with ``sliced``."""
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
    """A model of equal layers between a beginning and an end, cut into stages of whole layers.

    Args:
        model: an nnx module, or its shapes (``nnx.eval_shape``). All its variables are parameters.
        stages: into how many; as many layers for each as can be, the first ones one more where there is a rest.
        sizes: numbers of layers instead, such as ``pipeline.cut(costs, stages=stages).sizes``.
        inputs: one microbatch, or its shape. With it, parameters that only one end uses are told from shared ones;
            without it all of both ends are shared.
        first: (model, inputs) -> x, what comes before the layers. Default: the model's method ``before_blocks``.
        last: (model, x) -> output, what comes after them. Default: its method ``after_blocks``.
        layer: (layer, x) -> x. Default: calls it.
        layers: the attribute that has the layers: a list of modules, or one whose parameters are stacked.
        sliced: for schedules that cut sequences. A slice's inputs are (tokens, position of the first one), which
            ``before_blocks`` gets as two arguments; ``layer`` is (layer, x, context) -> (x, context), by default the
            layer's method ``continued``.

    Raises:
        ShardingError: no such attribute or methods, layers that differ, variables that are no parameters, or sizes
            that don't add up to the layers.
    """
    from flax import nnx

    asked = f"pipeline.split({type(model).__name__})"
    graph, states, stacked = _layers(asked, model, layers)
    sizes = _sizes(asked, len(states), stages, sizes)
    is_even = len(set(sizes)) == 1
    if first is None:
        enter = _end(asked, model, "before_blocks")
        first = (lambda model, inputs: enter(model, *inputs)) if sliced else enter
    last = _end(asked, model, "after_blocks") if last is None else last
    outer = nnx.clone(model)
    setattr(outer, layers, nnx.List([]))
    outer_graph, outer_state, rest = nnx.split(outer, nnx.Param, ...)
    _no_others(asked, rest)
    ends = _Ends(nnx, outer_graph, outer_state)
    params = {
        **ends.parts(first, last, inputs),
        "stages": _made(_regrouped(stages), stacked)
        if stacked is not None and is_even
        else _made(lambda states: _stacked(states, sizes), states),
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
        flow, stage = (x, 0) if is_even else x
        found = []
        for i, past in enumerate(context):
            args = _at(weights, i), flow, past
            if i < min(sizes):
                flow, after = one(*args)
            else:  # what pads a stage is never run
                nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(one, *args)[1])
                flow, after = jax.lax.cond(
                    i < jnp.asarray(sizes)[stage], one, lambda _, flow, __, none=nothing: (flow, none), *args
                )
            found.append(after)
        return flow if is_even else (flow, stage + 1), tuple(found)

    def whole(weights: Any, x: Any) -> Any:
        return run(weights, x, (None,) * max(sizes))[0]

    def merge(params: dict[str, Any]) -> Any:
        whole = ends.model(*(params[part] for part in ("first", "last", "shared") if part in params))
        setattr(whole, layers, joined(params["stages"]))
        return whole

    def joined(own: Any) -> Any:
        if stacked is not None and is_even:
            return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), own))
        states = _unstacked(own, sizes)
        if stacked is not None:
            return nnx.merge(graph, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        return nnx.List([nnx.merge(graph, state) for state in states])

    return Split(
        first_fn=first_fn,
        stage_fn=run if sliced else whole,
        last_fn=last_fn,
        params=params,
        sizes=sizes,
        merge=merge,
    )


class _Ends:
    """What is around the layers, and which of its parameters which end uses."""

    def __init__(self, nnx: Any, graph: Any, state: Any):
        self.nnx, self.graph, self.state = nnx, graph, state
        self.shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)

    def model(self, *states: Any) -> Any:
        """The model without layers; shapes stand for parameters that aren't among these."""
        given = [state for state in states if state is not None]
        return self.nnx.merge(self.graph, self.nnx.merge_state(self.shapes, *given))

    def parts(
        self,
        first: Callable[[Any, Any], Any],
        last: Callable[[Any, Any], Any],
        inputs: Any,
    ) -> dict[str, Any]:
        """The parameters by who uses them; those that nobody does are the first's."""
        if inputs is None:
            return {"shared": self.state} if jax.tree.leaves(self.state) else {}
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs)

        # Layers return what they get.
        x = jax.eval_shape(lambda state, inputs: first(self.model(state), inputs), self.shapes, one)
        at_first, at_last = self._used(first, one), self._used(last, x)
        users = {"first": at_first - at_last, "last": at_last - at_first, "shared": at_first & at_last}
        users["first"] |= {path for path, _ in self.nnx.to_flat_state(self.shapes)} - at_first - at_last
        found = {
            part: self.nnx.filter_state(self.state, lambda path, _, paths=paths: path in paths)
            for part, paths in users.items()
        }
        return {part: state for part, state in found.items() if jax.tree.leaves(state)}

    def _used(self, end: Callable[[Any, Any], Any], x: Any) -> set[Any]:
        """The paths of the parameters that an end's output depends on."""
        leaves, tree = jax.tree.flatten((self.shapes, x))

        def run(*arrays: Any) -> list[Any]:
            state, x = jax.tree.unflatten(tree, arrays)
            return jax.tree.leaves(end(self.model(state), x))

        jaxpr, outputs = jax.make_jaxpr(run, return_shape=True)(*leaves)
        used = compat.inputs_used(jaxpr, [True] * len(outputs))
        paths = [path for path, _ in self.nnx.to_flat_state(self.shapes)]
        return {path for path, is_used in zip(paths, used, strict=False) if is_used}


def _layers(asked: str, model: Any, name: str) -> tuple[Any, list[Any], Any]:
    """What a layer is, each layer's parameters, and those of all stacked where the model has them so."""
    from flax import nnx

    found = getattr(model, name, None)
    if found is None:
        raise ShardingError(asked, there=f"no attribute {name!r}", must="its layers are in an attribute", fix="layers=")
    if isinstance(found, nnx.Module) and not isinstance(found, nnx.List):
        graph, state, rest = nnx.split(found, nnx.Param, ...)
        _no_others(asked, rest)
        num = {leaf.shape[0] for leaf in jax.tree.leaves(state)}
        return graph, [_made(lambda state, i=i: _at(state, i), state) for i in range(num.pop())], state
    splits = [nnx.split(layer, nnx.Param, ...) for layer in found]
    for _, _, rest in splits:
        _no_others(asked, rest)
    graphs = [graph for graph, _, _ in splits]
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for _, state, _ in splits]
    odd = [i for i, each in enumerate(zip(graphs, shapes, strict=True)) if each != (graphs[0], shapes[0])]
    if odd:
        there = f"{name}[{odd[0]}] is another kind of layer than {name}[0]"
        raise ShardingError(asked, there=there, must="all layers are of one kind and shape")
    return graphs[0], [state for _, state, _ in splits], None


def _no_others(asked: str, rest: Any) -> None:
    from flax import nnx

    if found := ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]:
        there = f"{', '.join(found[:4])} {'is' if len(found) == 1 else 'are'} not"
        raise ShardingError(asked, there=there, must="all variables are parameters")


def _end(asked: str, model: Any, method: str) -> Callable[..., Any]:
    found = getattr(type(model), method, None)
    if found is None:
        what = "first" if method == "before_blocks" else "last"
        raise ShardingError(
            asked, there=f"no method {method!r}", must="what is around the layers is given", fix=f"{what}="
        )
    return found


def _sizes(asked: str, layers: int, stages: int, given: Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        if not is_count(stages) or not 1 <= stages <= layers:
            there = f"{layers} layers into {stages} stages"
            raise ShardingError(asked, there=there, must="every stage has a layer", fix=f"stages={layers} or fewer")
        return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    sizes = tuple(given)
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        there = f"sizes {sizes}, which are {len(sizes)} stages of {sum(sizes)} layers; {layers} layers"
        raise ShardingError(asked, there=there, must=f"{stages} numbers of at least 1 that add up to {layers}")
    return sizes


def _stacked(states: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Leaves [stages, layers of the largest one, ...]."""
    most = max(sizes)
    nothing = jax.tree.map(jnp.zeros_like, states[0])
    rows = [
        [*states[end - size : end], *[nothing] * (most - size)]
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]
    stages = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *row) for row in rows]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stages)


def _regrouped(stages: int) -> Callable[[Any], Any]:
    """[layers, ...] as [stages, layers of a stage, ...]: split over the layers they are split over the stages."""
    return lambda tree: jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:]), tree)


def _unstacked(stages: Any, sizes: Sequence[int]) -> list[Any]:
    return [_at(_at(stages, stage), i) for stage, size in enumerate(sizes) for i in range(size)]


def _made(make: Callable[..., Any], *args: Any) -> Any:
    """What a function makes of arrays, or its shapes where these are shapes."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        return jax.eval_shape(make, *args)
    return make(*args)


def _at(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
