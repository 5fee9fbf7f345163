"""DLRM on synthetic clicks: click-through prediction."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...models import dlrm, layouts
from ..config.optimizer_config import Optimization
from ..config.train_config import Recipe
from ..datasets import synthetic_clicks
from ..train_step import train_functions
from ..workload import DeviceMetrics, EvalOutput, Metric, Workload
from .model_family import Family

LOSS = Metric(name="loss", unit="nats per click")
HELDOUT = (
    Metric(name="heldout_nats", unit="nats per click", digits=4, final_digits=4),
    Metric(name="heldout_auc", unit="AUC", digits=4, final_digits=4),
)


def build(
    name: str, config: dlrm.Config, optimization: Optimization, *, steps: int, seed: int, sample: int = 0
) -> Workload:
    """The workload of a DLRM on synthetic clicks."""
    init, train_step, merge, _ = train_functions(
        lambda rngs: dlrm.DLRM(config, rngs=rngs),
        lambda model, batch, key: dlrm.loss(model, batch),
        layout=layouts.dlrm,
        optimization=optimization,
        steps=steps,
    )

    def evaluate(params: nnx.State, variables: nnx.State, batch: dlrm.Clicks) -> DeviceMetrics:
        logits = merge(params, variables)(batch.numbers, batch.categories)
        return {"logits": logits, "clicked": batch.clicked}

    def batch_shapes(size: int) -> dlrm.Clicks:
        return dlrm.Clicks(
            jax.ShapeDtypeStruct((size, config.numbers), jnp.float32),
            jax.ShapeDtypeStruct((size, len(config.tables)), jnp.int32),
            jax.ShapeDtypeStruct((size,), jnp.float32),
        )

    def source(batch_size: int, seed: int) -> synthetic_clicks.SyntheticClicks:
        return synthetic_clicks.make(numbers=config.numbers, tables=config.tables, batch_size=batch_size, seed=seed)

    return Workload(
        name=name,
        config=config,
        summary=f"{len(config.tables)} tables of {sum(config.tables):,} rows",
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


def score(batches: Sequence[EvalOutput]) -> dict[str, float]:
    """Mean nats and the area under the ROC curve, over the examples of all batches."""
    logits, clicked = (np.concatenate([output[name] for output in batches]) for name in ("logits", "clicked"))
    return {
        "heldout_nats": synthetic_clicks.log_loss(logits, clicked),
        "heldout_auc": synthetic_clicks.auc(logits, clicked),
    }


def recipe(name: str) -> Recipe:
    """The default training settings of a DLRM: no weight decay, which would shrink rows that no example looks up."""
    optimization = Optimization(lr=1e-2, warmup=50, weight_decay=0.0)
    return Recipe(steps=1500, batch=2048, optimization=optimization, eval_every=250, checkpoint_every=500)


FAMILY = Family(presets=dlrm.PRESETS, recipe=recipe, build=build)
