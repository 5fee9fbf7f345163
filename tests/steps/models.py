"""The train steps of `sharding.models`: gradients clipped, AdamW."""

from typing import Any

import jax
import jax.numpy as jnp

from sharding.launch.config import Optimization
from sharding.launch.training import trained
from sharding.models import bert, dlrm, gpt, images, layouts, resnet, vit

from .step import Make, Step, whole_mesh

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


def step(module, loss, layout, batch) -> Make:
    """The step of one model; its weights are split as its layout says."""

    def make(style, sizes):
        weights = style == "weights"
        rules = layout if weights else lambda axes: ()
        init, train_step, *_ = trained(module, loss, layout=rules, optimization=Optimization(), steps=20)
        rows = layouts.batch(sizes) if weights else whole_mesh(sizes)
        return Step(run=train_step, args=(jax.eval_shape(init, jax.random.key(0)), batch), specs=(None, rows))

    return make


def of_gpt(**options) -> Make:
    config = gpt.Config(vocab=64, context=16, **(BLOCKS | {"kv_heads": 8} | options))
    return step(lambda rngs: gpt.GPT(config, rngs=rngs), gpt.next_token_loss, layouts.gpt, ints(ROWS, 17))


def of_bert() -> Make:
    batch = bert.Masked(ints(ROWS, 16), ints(ROWS, 4), ints(ROWS, 4))
    return step(lambda rngs: bert.BERT(BERT, rngs=rngs), bert.masked_loss, layouts.bert, batch)


def of_resnet() -> Make:
    def loss(model, batch, key):
        return images.loss(model(batch.images, training=True), batch.labels)

    batch = images.Labelled(floats(ROWS, 8, 8, 1), ints(ROWS))
    return step(lambda rngs: resnet.ResNet(RESNET, rngs=rngs), loss, layouts.resnet, batch)


def of_vit() -> Make:
    def loss(model, batch, key):
        return images.loss(model(batch.images, key), batch.labels)

    batch = images.Labelled(floats(ROWS, 8, 8, 1), ints(ROWS))
    return step(lambda rngs: vit.ViT(VIT, rngs=rngs), loss, layouts.vit, batch)


def of_dlrm() -> Make:
    batch = dlrm.Clicks(floats(ROWS, 8), ints(ROWS, 3), floats(ROWS))
    return step(lambda rngs: dlrm.DLRM(DLRM, rngs=rngs), lambda m, b, key: dlrm.loss(m, b), layouts.dlrm, batch)


STEPS: dict[str, Make] = {
    "gpt": of_gpt(),
    "gpt, scanned": of_gpt(scan=True),
    "gpt, scanned, remat": of_gpt(scan=True, remat=True),
    "bert": of_bert(),
    "resnet": of_resnet(),
    "vit": of_vit(),
    "dlrm": of_dlrm(),
}
