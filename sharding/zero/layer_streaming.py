"""Training of a sequence of layers whose parameters are on disk: one layer, or one tile of it, at a time.

ZeRO-Infinity's overlap-centric and memory-centric parts (Rajbhandari et al., SC 2021, 2104.07857, sections 5.1.3 and
6.2): what is read next is known, so it is read ahead; a layer too large to be whole is given in tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import paths
from .disk_optimizer import DiskOptimizer, ahead

LayerFn = Callable[[Any, Any], Any]
"""parameters, input -> output."""


class Tiled(NamedTuple):
    """A layer in tiles, such as the columns of a large matrix: its output is that of the tiles, side by side.

    Its parameters are a list, with one pytree per tile; every tile gets the layer's input.
    """

    fn: LayerFn
    """parameters of one tile, input -> output of that tile, concatenated with the others along the last dim."""


class LayerTrainer:
    """Trains a sequence of layers with parameters on disk.

    The forward pass reads the layers in order and keeps the input of each; the backward pass reads them in reverse, and
    each layer is updated as soon as it has its gradient. At no time is more than one layer or tile on the devices,
    beside activations and the window.

    Example:
        >>> import tempfile
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from sharding import zero
        >>> def layer(w, x):
        ...     return jnp.tanh(x @ w)
        >>> def loss(y, target):
        ...     return jnp.mean((y - target) ** 2)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     on_disk = zero.DiskOptimizer(optax.adam(1e-2), directory)
        ...     on_disk.init([jnp.ones((4, 8)) / 4, [jnp.ones((8, 2)) / 8] * 3])
        ...     trainer = zero.LayerTrainer(on_disk, [layer, zero.Tiled(layer)], loss)
        ...     losses = [float(trainer.step(jnp.ones((2, 4)), jnp.ones((2, 6)))) for _ in range(3)]
        >>> on_disk.names, on_disk.step, losses[0] > losses[1] > losses[2]
        (['0', '1/0', '1/1', '1/2'], 3, True)
    """

    def __init__(
        self, optimizer: DiskOptimizer, layers: Sequence[LayerFn | Tiled], loss: Callable[[Any, Any], jax.Array]
    ):
        """A trainer of these layers.

        Args:
            optimizer: initialized with the list of the layers' parameters, each an array or nested dicts of arrays.
            layers: functions of parameters and input, or `Tiled`.
            loss: output of the last layer, target -> scalar.
        """
        self.optimizer, self.layers = optimizer, layers
        self._forward = {layer: jax.jit(_function(layer)) for layer in layers}
        self._backward = {layer: jax.jit(_gradients(_function(layer))) for layer in layers}
        self._loss = jax.jit(jax.value_and_grad(loss))

    def step(self, x: Any, target: Any) -> jax.Array:
        """The loss of a batch, after a step by its gradient. Raises as `DiskOptimizer.update`."""
        order = [(layer, unit) for k, layer in enumerate(self.layers) for unit in self._units(k)]
        reads = [unit for _, unit in (*order, *reversed(order))]
        with ThreadPoolExecutor(1) as thread, self.optimizer.taking_step() as apply:
            params = ahead((lambda unit=unit: self._read(unit) for unit in reads), 1, thread)
            inputs, widths = [], []
            for k, layer in enumerate(self.layers):
                outputs = [self._forward[layer](self._placed(next(params)), x) for _ in self._units(k)]
                inputs.append(x)
                widths.append([output.shape[-1] for output in outputs] if isinstance(layer, Tiled) else None)
                x = outputs[0] if widths[-1] is None else jnp.concatenate(outputs, axis=-1)
            value, cotangent = self._loss(x, target)
            for k, layer in reversed([*enumerate(self.layers)]):
                parts = _split(cotangent, widths.pop())
                x, cotangent = inputs.pop(), None
                for unit, part in reversed([*zip(self._units(k), parts, strict=True)]):
                    gradients, own = self._backward[layer](self._placed(next(params)), x, part)
                    apply({unit + name: gradient for name, gradient in _named(gradients).items()})
                    cotangent = own if cotangent is None else jax.tree.map(jnp.add, cotangent, own)
        return value

    def _units(self, k: int) -> list[str]:
        """The prefixes of the names of a layer's parameters: one, or one per tile, in order."""
        names = [name.split("/") for name in self.optimizer.names if name.split("/")[0] == str(k)]
        if not isinstance(self.layers[k], Tiled):
            return [str(k)]
        return [f"{k}/{tile}" for tile in dict.fromkeys(parts[1] for parts in names)]

    def _read(self, unit: str) -> Any:
        """The parameters of a unit, as nested dicts."""
        found: dict[str, Any] = {}
        for name in self.optimizer.names:
            if name == unit:
                return self.optimizer.read(name)
            if not name.startswith(f"{unit}/"):
                continue
            *outer, last = name[len(unit) + 1 :].split("/")
            inner = found
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = self.optimizer.read(name)
        return found

    def _placed(self, params: Any) -> Any:
        return jax.tree.map(self.optimizer.placed, params)


def _function(layer: LayerFn | Tiled) -> LayerFn:
    return layer.fn if isinstance(layer, Tiled) else layer


def _gradients(fn: LayerFn) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """parameters, input, cotangent of the output -> gradients of parameters and input."""
    return lambda params, x, cotangent: jax.vjp(fn, params, x)[1](cotangent)


def _split(cotangent: Any, widths: Sequence[int] | None) -> list[Any]:
    """A cotangent by the tiles that the output is of."""
    if widths is None:
        return [cotangent]
    return jnp.split(cotangent, [*itertools.accumulate(widths)][:-1], axis=-1)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by the end of their name: with a slash before it, or nothing for a lone array."""
    return {f"/{paths.text(path)}" if path else "": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
