"""Train steps of `sharding.models` with gradient clipping and AdamW."""

from typing import Any

import jax
import jax.numpy as jnp

import sharding
from sharding.launch.config.optimizer_config import Optimization
from sharding.launch.train_step import train_functions
from sharding.models import bert, dlrm, gpt, image_classifier, layouts, resnet, vit

from .step import MakeStep, Step, over_all_axes

ROWS = 16
BLOCKS: dict[str, Any] = {"layers": 2, "features": 32, "heads": 8, "mlp_features": 64}
BERT = bert.Config(vocab=64, context=16, **BLOCKS)
RESNET = resnet.Config(image=8, channels=1, classes=16, stages=(1, 1), width=16, stem="small")
VIT = vit.Config(image=8, channels=1, patch=2, classes=16, pool="mean", **BLOCKS)
DLRM = dlrm.Config(numbers=8, tables=(40, 20, 10), features=16, bottom=(32,), top=(32, 16))


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def step(module, loss, layout, batch) -> MakeStep:
    """The train step of a model, with its layout in style `weights`."""

    def make(style, sizes):
        weights = style == "weights"
        rules = layout if weights else lambda axes: sharding.layout({})
        init, train_step, *_ = train_functions(module, loss, layout=rules, optimization=Optimization(), steps=20)
        rows = layouts.batch(sizes) if weights else over_all_axes(sizes)
        return Step(run=train_step, args=(jax.eval_shape(init, jax.random.key(0)), batch), specs=(None, rows))

    return make


def gpt_step(rows=ROWS, **options) -> MakeStep:
    config = gpt.Config(**({"vocab": 64, "context": 16, **BLOCKS, "kv_heads": 8} | options))
    batch = ints(rows, config.context + 1)
    return step(lambda rngs: gpt.GPT(config, rngs=rngs), gpt.next_token_loss, layouts.gpt, batch)


def bert_step() -> MakeStep:
    batch = bert.Masked(ints(ROWS, 16), ints(ROWS, 4), ints(ROWS, 4))
    return step(lambda rngs: bert.BERT(BERT, rngs=rngs), bert.masked_loss, layouts.bert, batch)


def resnet_step() -> MakeStep:
    def loss(model, batch, key):
        return image_classifier.loss(model(batch.images, training=True), batch.labels)

    batch = image_classifier.Labelled(floats(ROWS, 8, 8, 1), ints(ROWS))
    return step(lambda rngs: resnet.ResNet(RESNET, rngs=rngs), loss, layouts.resnet, batch)


def vit_step() -> MakeStep:
    def loss(model, batch, key):
        return image_classifier.loss(model(batch.images, key), batch.labels)

    batch = image_classifier.Labelled(floats(ROWS, 8, 8, 1), ints(ROWS))
    return step(lambda rngs: vit.ViT(VIT, rngs=rngs), loss, layouts.vit, batch)


def dlrm_step() -> MakeStep:
    batch = dlrm.Clicks(floats(ROWS, 8), ints(ROWS, 3), floats(ROWS))
    return step(lambda rngs: dlrm.DLRM(DLRM, rngs=rngs), lambda m, b, key: dlrm.loss(m, b), layouts.dlrm, batch)


STEPS: dict[str, MakeStep] = {
    "gpt": gpt_step(),
    "gpt, scanned": gpt_step(scan=True),
    "gpt, scanned, remat": gpt_step(scan=True, remat=True),
    "bert": bert_step(),
    "resnet": resnet_step(),
    "vit": vit_step(),
    "dlrm": dlrm_step(),
}
