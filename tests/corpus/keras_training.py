"""What the adapters of Keras' models share: models whose variables are shapes, and their train steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import keras
import optax
from support.train_steps.step import Sizes, Step

from .common import batch_specs

Made = TypeVar("Made")
LossFn = Callable[[Any, Any], jax.Array]
"""(outputs of the model, targets) -> mean loss."""


def abstract(make: Callable[[], Made]) -> Made:
    """What `make` returns, with variables that have shapes and no values."""
    with keras.StatelessScope(initialize_variables=False):
        made = make()
    keras.backend.clear_session()  # or the next scope initializes the variables
    return made


def shapes(variables: list[Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape of each variable."""
    found = {v.path: jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables}
    if len(found) != len(variables):
        raise ValueError("Two variables have one path.")
    return found


def keras_step(
    model: Any,
    loss: LossFn,
    inputs: Any,
    targets: Any,
    sizes: Sizes,
    *,
    weights: Callable[[Any, Sizes], Any],
    optimizer: Any = None,
) -> Step:
    """The train step of a model by `stateless_call`, with AdamW of Optax or another optimizer.

    Args:
        model: its variables may be abstract.
        loss: as `LossFn`.
        inputs: shapes of the model's inputs.
        targets: shapes of the loss' targets.
        sizes: the mesh.
        weights: (shapes of the trainable variables, sizes) -> their specs.
        optimizer: Optax' or Keras'; its state is left open.
    """
    optimizer = optax.adamw(1e-4) if optimizer is None else optimizer
    paths = [v.path for v in model.trainable_variables]
    params = shapes(model.trainable_variables)
    others = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in model.non_trainable_variables]
    if isinstance(optimizer, keras.optimizers.Optimizer):
        abstract(lambda: optimizer.build(model.trainable_variables))
        optimizer_state = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in optimizer.variables]
    else:
        optimizer_state = jax.eval_shape(optimizer.init, params)

    def mean(params: Any, others: Any, inputs: Any, targets: Any) -> Any:
        outputs, others = model.stateless_call([params[path] for path in paths], others, inputs, training=True)
        return loss(outputs, targets), others

    def updated(params: Any, optimizer_state: Any, gradient: Any) -> Any:
        if isinstance(optimizer, keras.optimizers.Optimizer):
            gradients, values = ([tree[path] for path in paths] for tree in (gradient, params))
            values, optimizer_state = optimizer.stateless_apply(optimizer_state, gradients, values)
            return dict(zip(paths, values, strict=True)), optimizer_state
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state

    def run(state: Any, inputs: Any, targets: Any) -> Any:
        params, others, optimizer_state = state
        (value, others), gradient = jax.value_and_grad(mean, has_aux=True)(params, others, inputs, targets)
        params, optimizer_state = updated(params, optimizer_state, gradient)
        return (params, others, optimizer_state), value

    return Step(
        run=run,
        args=((params, others, optimizer_state), inputs, targets),
        specs=((weights(params, sizes), None, None), batch_specs(inputs, sizes), batch_specs(targets, sizes)),
    )
