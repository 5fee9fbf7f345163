"""Kinds of calls whose dispatch is timed: the same program by `sharding.jit` and by a hand-sharded `jax.jit`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import sharding
from sharding import P

Timed = Callable[[], float]
"""One call of a function; returns the seconds until it returns, after which its results are awaited."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """Many small arrays, sharded over one mesh axis."""

    number: int
    spec: P
    mesh: Any

    @property
    def named(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec)

    @property
    def names(self) -> list[str]:
        return [f"w{i}" for i in range(self.number)]

    def new(self, rows: int = 8) -> list[jax.Array]:
        return jax.device_put([np.ones((rows, 8), np.float32)] * self.number, [self.named] * self.number)

    def annotated(self, xs: Any) -> Any:
        return jax.tree.map(lambda x: sharding.annotate(x, self.spec), xs)


def _scaled(xs: Any, factor: float = 0.5) -> Any:
    return jax.tree.map(lambda x: x * factor + 1, xs)


def donated_state(arrays: Arrays) -> tuple[Timed, Timed]:
    """A dict of donated arrays, replaced by the result of each call: a train step."""
    named = dict.fromkeys(arrays.names, arrays.named)
    mine = sharding.jit(lambda state: _scaled(arrays.annotated(state)), donate_argnums=(0,))
    hand = jax.jit(_scaled, in_shardings=(named,), out_shardings=named, donate_argnums=(0,))

    def calls(step: Any) -> Timed:
        states = [dict(zip(arrays.names, arrays.new(), strict=True))]
        return lambda: _timed(step, states[0], keep=lambda result: states.__setitem__(0, result))

    return calls(mine), calls(hand)


def positional(arrays: Arrays) -> tuple[Timed, Timed]:
    """Each array an argument of its own."""
    xs, named = arrays.new(), [arrays.named] * arrays.number
    mine = sharding.jit(lambda *xs: _scaled(arrays.annotated(xs)))
    hand = jax.jit(lambda *xs: _scaled(xs), in_shardings=tuple(named), out_shardings=tuple(named))
    return lambda: _timed(mine, *xs), lambda: _timed(hand, *xs)


def static(arrays: Arrays) -> tuple[Timed, Timed]:
    """A list of arrays, and a static number."""
    xs, named = arrays.new(), [arrays.named] * arrays.number
    mine = sharding.jit(lambda xs, factor: _scaled(arrays.annotated(xs), factor), static_argnums=(1,))
    hand = jax.jit(_scaled, static_argnums=(1,), in_shardings=(named,), out_shardings=named)
    return lambda: _timed(mine, xs, 0.5), lambda: _timed(hand, xs, 0.5)


def keyword(arrays: Arrays) -> tuple[Timed, Timed]:
    """A list of arrays by keyword. `jax.jit` takes no `in_shardings` for it, and the shardings of the arrays."""
    xs, named = arrays.new(), [arrays.named] * arrays.number
    mine = sharding.jit(lambda *, xs: _scaled(arrays.annotated(xs)))
    hand = jax.jit(lambda *, xs: _scaled(xs), out_shardings=named)
    return lambda: _timed(mine, xs=xs), lambda: _timed(hand, xs=xs)


def two_shapes(arrays: Arrays) -> tuple[Timed, Timed]:
    """Lists of arrays of two shapes, in turns."""
    batches, named = [arrays.new(8), arrays.new(16)], [arrays.named] * arrays.number
    mine = sharding.jit(lambda xs: _scaled(arrays.annotated(xs)))
    hand = jax.jit(_scaled, in_shardings=(named,), out_shardings=named)
    return tuple(lambda step=step: sum(_timed(step, xs) for xs in batches) / 2 for step in (mine, hand))


def numpy_inputs(arrays: Arrays) -> tuple[Timed, Timed]:
    """NumPy arrays, which every call transfers."""
    xs, named = [np.ones((8, 8), np.float32) for _ in range(arrays.number)], [arrays.named] * arrays.number
    mine = sharding.jit(_scaled, in_shardings=(arrays.spec,))
    hand = jax.jit(_scaled, in_shardings=(named,), out_shardings=named)
    return lambda: _timed(mine, xs), lambda: _timed(hand, xs)


KINDS = {
    "positional": positional,
    "static": static,
    "keyword": keyword,
    "two shapes in turns": two_shapes,
    "NumPy": numpy_inputs,
}
"""Beside `donated_state`."""


def _timed(f: Callable[..., Any], *args: Any, keep: Callable[[Any], Any] = lambda _: None, **kwargs: Any) -> float:
    begun = time.perf_counter()
    result = f(*args, **kwargs)
    seconds = time.perf_counter() - begun
    keep(result)
    jax.block_until_ready(result)
    return seconds
