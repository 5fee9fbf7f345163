"""A DLRM: click prediction from dense and categorical features, as plain flax nnx modules without any sharding.

As published: a bottom MLP embeds the dense features, each categorical feature looks up a row of its own embedding
table, all pairs of vectors are multiplied, and a top MLP maps the dot products and the bottom vector to one logit.

All tables are concatenated by rows into one array, padded to a multiple of 128 rows: all lookups are one gather, and
the rows shard evenly over an axis whatever the sizes of the tables.

Shape suffixes: B batch, N dense features, T tables, K vectors (T + 1), E features of a vector, R rows of all tables,
P pairs of vectors, F features of an MLP's layer.

References: Naumov et al., DLRM, arXiv:1906.00091, section 2.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Model sizes; all errors are reported together."""

    numbers: int
    """Number of dense features of an example."""
    tables: tuple[int, ...]
    """Rows of each embedding table: the number of its categories."""
    features: int
    """Width of the embeddings and of the bottom MLP's output."""
    bottom: tuple[int, ...]
    """Widths of the hidden layers of the bottom MLP."""
    top: tuple[int, ...]
    """Widths of the hidden layers of the top MLP."""
    dtype: str = "float32"
    """Dtype of activations, float32 or bfloat16; parameters and logits stay in float32."""

    def __post_init__(self):
        wrong = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("numbers", "features")
            if getattr(self, name) < 1
        ]
        if not self.tables:
            wrong.append("tables=() must have at least one")
        for name in ("tables", "bottom", "top"):
            if any(size < 1 for size in getattr(self, name)):
                wrong.append(f"{name}={getattr(self, name)} must be numbers of at least 1")
        if self.dtype not in ("float32", "bfloat16"):
            wrong.append(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")
        if wrong:
            raise ValueError("dlrm.Config: " + "; ".join(wrong))

    @property
    def num_rows(self) -> int:
        """Rows of all tables together, with padding."""
        return math.ceil(sum(self.tables) / ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def num_pairs(self) -> int:
        return math.comb(len(self.tables) + 1, 2)


# The large preset has the tables of MLPerf's DLRM on the Criteo Terabyte data set, each at most 40 million rows.
PRESETS = {
    "dlrm-tiny": Config(
        numbers=8, tables=(1000, 500, 300, 200, 100, 50, 20, 10), features=16, bottom=(64,), top=(64, 32),
    ),
    "dlrm-large": Config(
        numbers=13,
        tables=(
            40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
            11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
        ),
        features=128, bottom=(512, 256), top=(1024, 1024, 512, 256), dtype="bfloat16",
    ),
}  # fmt: skip


class Layer(nnx.Module):
    """A dense layer with a bias, x_BF -> x_BF."""

    def __init__(self, before: int, after: int, *, rngs: nnx.Rngs):
        init = jax.random.normal(rngs.params(), (before, after), jnp.float32)
        self.w = nnx.Param(init * (2 / (before + after)) ** 0.5)
        self.bias = nnx.Param(jnp.zeros((after,), jnp.float32))

    def __call__(self, x_BF: jax.Array) -> jax.Array:
        return jnp.einsum("BF,FG->BG", x_BF, self.w[...].astype(x_BF.dtype)) + self.bias[...].astype(x_BF.dtype)[None]


def _layers(widths: list[int], rngs: nnx.Rngs) -> nnx.List[Layer]:
    return nnx.List([Layer(before, after, rngs=rngs) for before, after in itertools.pairwise(widths)])


class Tables(nnx.Module):
    """Embedding lookup in all tables, categories_BT -> vectors_BTE."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        init = jax.random.normal(rngs.params(), (config.num_rows, config.features), jnp.float32)
        # Small, so that the initial values of rare categories carry little weight.
        self.rows = nnx.Param(0.1 * init / config.features**0.5)

    def __call__(self, categories_BT: jax.Array) -> jax.Array:
        first_T = np.cumsum([0, *self.config.tables[:-1]]).astype(np.int32)
        rows_BT = categories_BT + first_T[None, :]
        return jnp.take(self.rows[...].astype(self.config.dtype), rows_BT, axis=0, mode="clip")


def interactions(vectors_BKE: jax.Array) -> jax.Array:
    """Dot products of all pairs of different vectors, [B, P]: the strict lower triangle in row-major order."""
    count = vectors_BKE.shape[1]
    products_BKL = jnp.einsum("BKE,BLE->BKL", vectors_BKE, vectors_BKE)
    rows, columns = np.tril_indices(count, -1)
    return jnp.take(products_BKL.reshape(-1, count * count), rows * count + columns, axis=1, mode="clip")


class DLRM(nnx.Module):
    """A DLRM: numbers_BN, categories_BT -> logits_B.

    Args:
        config: model configuration.
        rngs: initialises parameters from its `params` stream.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.tables = Tables(config, rngs=rngs)
        self.bottom = _layers([config.numbers, *config.bottom, config.features], rngs)
        widths = [config.features + config.num_pairs, *config.top]
        self.top = _layers(widths, rngs)
        self.last = Layer(widths[-1], 1, rngs=rngs)

    def __call__(self, numbers_BN: jax.Array, categories_BT: jax.Array) -> jax.Array:
        """Logits [B] of a click, float32."""
        x_BE = numbers_BN.astype(self.config.dtype)
        for layer in self.bottom:
            x_BE = jax.nn.relu(layer(x_BE))
        vectors_BKE = jnp.concatenate([x_BE[:, None, :], self.tables(categories_BT)], axis=1)
        h_BF = jnp.concatenate([x_BE, interactions(vectors_BKE)], axis=1)
        for layer in self.top:
            h_BF = jax.nn.relu(layer(h_BF))
        return self.last(h_BF.astype(jnp.float32))[:, 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Clicks:
    """A labelled batch: host or device arrays, or their ShapeDtypeStructs."""

    numbers: Any
    """[B, N]"""
    categories: Any
    """[B, T], the row in each table."""
    clicked: Any
    """[B], 0 or 1."""


def loss(model: DLRM, batch: Clicks) -> jax.Array:
    """Mean binary cross entropy in nats per example."""
    logits_B = model(batch.numbers, batch.categories)
    return jnp.mean(jax.nn.softplus(logits_B) - batch.clicked.astype(jnp.float32) * logits_B)
