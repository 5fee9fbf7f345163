"""Small Pallas kernels, which run in interpret mode.

Shape suffixes: B batch, H heads, K heads of keys and values, T queries, S keys, D features; M, N, V rows and columns.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

call = functools.partial(pl.pallas_call, interpret=True)


def _matmul(x, w, out, total):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += x[...] @ w[...]

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = total[...]


def matmul(x_MK, w_KN, block=4):
    """A product in blocks, summed in scratch memory by the programs of the last axis of the grid."""
    (m, k), n = x_MK.shape, w_KN.shape[1]
    return call(
        _matmul,
        grid=(m // block, n // block, k // block),
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x_MK.dtype),
        scratch_shapes=[pltpu.VMEM((block, block), x_MK.dtype)],
        name="matmul",
    )(x_MK, w_KN)


def _attention(q, k, v, out):
    rows = pl.program_id(2) * q.shape[0] + jnp.arange(q.shape[0])
    scores = jnp.where(rows[:, None] >= jnp.arange(k.shape[0])[None], q[...] @ k[...].T, -1e30)
    out[...] = jax.nn.softmax(scores, axis=-1) @ v[...]


def attention(q_BHTD, k_BKSD, v_BKSD, block=4):
    """Causal attention of grouped queries, whose mask reads the id of the program along the queries."""
    b, h, t, d = q_BHTD.shape
    _, kv, s, _ = k_BKSD.shape
    queries = pl.BlockSpec((None, None, block, d), lambda b, h, i: (b, h, i, 0))
    keys = pl.BlockSpec((None, None, s, d), lambda b, j, i: (b, j // (h // kv), 0, 0))
    return call(
        _attention,
        grid=(b, h, t // block),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct(q_BHTD.shape, q_BHTD.dtype),
        name="attention",
    )(q_BHTD, k_BKSD, v_BKSD)


def _lookup(ids, table, out):
    out[...] = table[...]


def lookup(ids_M, table_VN, block=4):
    """Rows of a table, whose blocks are found by prefetched ids."""
    (m,), n = ids_M.shape, table_VN.shape[1]
    return call(
        _lookup,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(m, n // block),
            in_specs=[pl.BlockSpec((1, block), lambda i, j, ids: (ids[i], j))],
            out_specs=pl.BlockSpec((1, block), lambda i, j, ids: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((m, n), table_VN.dtype),
        name="lookup",
    )(ids_M, table_VN)


def _scaled(x, out):
    out[...] = 2 * x[...]


def scaled(x_MN, index_map=lambda i: (i, 0), block=2, **options):
    """Twice the rows, visited in some order."""
    m, n = x_MN.shape
    spec = pl.BlockSpec((block, n), index_map)
    shape = jax.ShapeDtypeStruct((m, n), x_MN.dtype)
    rows = pl.cdiv(m, block)
    return call(_scaled, grid=(rows,), in_specs=[spec], out_specs=spec, out_shape=shape, name="scaled", **options)(x_MN)


RULES = {
    "matmul": ("m k, k n -> m n", {}),
    "attention": ("b (k g) t d, b k s d, b k s d -> b (k g) t d", {"need_replication": ["s", "d"]}),
    "lookup": ("m, v n -> m n", {"need_replication": ["v"]}),
    "scaled": ("m n -> m n", {}),
}
"""Kernel -> its rule, as `rules.register` takes it."""
