"""DLRMs on clicks that a hidden model made up: how likely an example is clicked."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import dlrm, layouts
from .. import clicks
from ..config import Optimization, Recipe
from ..task import Figure, Looked, Measured, Task
from ..training import trained
from .family import Family

LOSS = Figure(name="loss", unit="nats per click")
HELDOUT = (
    Figure(name="heldout_nats", unit="nats per click", digits=4, last_digits=4),
    Figure(name="heldout_auc", unit="AUC", digits=4, last_digits=4),
)


def build(
    name: str, config: dlrm.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Task:
    """The task of training a DLRM on the clicks of a hidden model."""
    init, train_step, merged, _ = trained(
        lambda rngs: dlrm.DLRM(config, rngs=rngs),
        lambda model, batch, key: dlrm.loss(model, batch),
        layout=layouts.dlrm,
        optimization=optimization,
        steps=steps,
    )

    def evaluate(params: nnx.State, variables: nnx.State, batch: dlrm.Clicks) -> Measured:
        logits = merged(params, variables)(batch.numbers, batch.categories)
        return {"logits": logits, "clicked": batch.clicked}

    def batch_shapes(size: int) -> dlrm.Clicks:
        return dlrm.Clicks(
            jax.ShapeDtypeStruct((size, config.numbers), jnp.float32),
            jax.ShapeDtypeStruct((size, len(config.tables)), jnp.int32),
            jax.ShapeDtypeStruct((size,), jnp.float32),
        )

    def source(batch_size: int, seed: int) -> clicks.HiddenClicks:
        return clicks.make(numbers=config.numbers, tables=config.tables, batch_size=batch_size, seed=seed)

    return Task(
        name=name,
        config=config,
        about=f"{len(config.tables)} tables of {sum(config.tables):,} rows",
        init=init,
        train_step=train_step,
        evaluate=evaluate,
        score=score,
        batch_shapes=batch_shapes,
        source=source,
        loss=LOSS,
        heldout=HELDOUT,
        item="examples",
    )


def score(batches: Sequence[Looked]) -> dict[str, float]:
    """Mean nats and the area under the curve, over the examples of all batches."""
    logits, clicked = (np.concatenate([looked[name] for looked in batches]) for name in ("logits", "clicked"))
    return {"heldout_nats": clicks.log_loss(logits, clicked), "heldout_auc": clicks.auc(logits, clicked)}


def recipe(name: str) -> Recipe:
    """How a DLRM is trained by default: without decay, which would act on rows that no example asks for."""
    optimization = Optimization(lr=1e-2, warmup=50, weight_decay=0.0)
    return Recipe(steps=1500, batch=2048, optimization=optimization, eval_every=250, checkpoint_every=500)


FAMILY = Family(presets=dlrm.PRESETS, recipe=recipe, build=build)
