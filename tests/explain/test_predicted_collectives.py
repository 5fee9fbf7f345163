"""Small programs whose collectives follow from one mechanism each, as predicted and as compiled, on three compilers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.compilers import COMPILERS, predicted_and_compiled

import sharding
from sharding import P, annotate

pytestmark = pytest.mark.filterwarnings("ignore:.*XLA pads it")


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


@dataclass(frozen=True, kw_only=True)
class Program:
    run: Callable[..., Any]
    args: tuple[Any, ...]
    sizes: dict[str, int] = field(default_factory=lambda: {"a": 8})
    options: dict[str, Any] = field(default_factory=dict)


def unused_sum(x, rows):
    """A loop whose carry, which nothing reads, needs a sum."""
    total = jnp.broadcast_to(jnp.sum(x), x.shape)
    return lax.scan(lambda carry, row: (carry + total, row * 2), x, rows)[1]


def scan_of_a_moved_stack(x):
    """The gradient of a loop reads a stack that is sharded over another dim than its rows."""

    def loss(x):
        carry, ys = lax.scan(lambda c, row: (jnp.tanh(c + jnp.sum(row)), jnp.tanh(c)), x, x)
        return jnp.sum(jnp.sin(carry)) + jnp.sum(jnp.sin(ys)), ys

    return jax.grad(loss, has_aux=True)(x)


def products_of_an_array_gathered_and_moved(x, y, w):
    """One product reads what another one moves further."""
    by_rows = lax.dot_general(x, y, (((0,), (0,)), ((), ())))
    return annotate(by_rows, P(None, "b")), annotate(x @ w, P(None, "b"))


def ring_of_products(x, w):
    """A loop that rotates an array between devices, where only a product reads it."""

    def body(carry, _):
        x, total = carry
        return (annotate(jnp.roll(x, x.shape[0] // 8, 0), P("a")), total + x @ w), None

    return lax.scan(body, (x * 2, x), None, length=4)[0][1]


def shared_scalar(x, w):
    """The cotangent of a sum is a broadcast scalar, scaled, that two products read."""

    def body(i, c):
        return jnp.tanh(c + jnp.sum((c @ w) * 0.5))

    return jax.grad(lambda x: jnp.sum(lax.fori_loop(0, 2, body, x)))(x)


def rows_written_to_a_replicated_array(x, i, rows):
    return jnp.cumsum(annotate(x.at[i].add(rows), P(None, "a")), axis=0)


POOL = (2, 1, 1, 1)

PROGRAMS = {
    "a sum over two axes": Program(
        run=lambda x: (x.sum(), x.sum(0)),
        args=(floats(64, 64, 128),),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a", "b")},
    ),
    "a sum of which each of all devices keeps a slice": Program(
        run=lambda x, y: x.T @ y,
        args=(floats(16, 128), floats(16, 256)),
        options={"in_shardings": P("a"), "out_shardings": P("a")},
    ),
    "a product's sum that is sliced along sharded rows": Program(
        run=jnp.matmul,
        args=(floats(256, 128), floats(128, 256)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": (P("a", "b"), P("b")), "out_shardings": P(("a", "b"))},
    ),
    "a product's sum that is sliced beside idle devices": Program(
        run=jnp.matmul,
        args=(floats(256, 128), floats(128, 256)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": (P(None, "a"), P("a")), "out_shardings": P("a")},
    ),
    "a product's sum over two axes that is sliced along one": Program(
        run=lambda x, y: x.T @ y,
        args=(floats(32, 256), floats(32, 256)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P(("a", "b")), "out_shardings": P("b")},
    ),
    "a sum of vectors over two axes that is sliced along one": Program(
        run=lambda x, y: jnp.einsum("abk,abk->k", x, y),
        args=(floats(8, 8, 256), floats(8, 8, 256)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a", "b"), "out_shardings": P("b")},
    ),
    "a part of a product's sum that is sliced": Program(
        run=lambda x, w: jnp.prod(jnp.stack(jnp.split(x @ w, 2, 1)), 0),
        args=(floats(256, 16), floats(16, 256)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": (P(None, "a"), P("a")), "out_shardings": P("a")},
    ),
    "products behind which nothing needs 32 bits": Program(
        run=lambda x, w, u: jax.nn.relu(x @ w) @ u,
        args=(floats(64, 16), floats(16, 32), floats(32, 64)),
        options={"in_shardings": (P(None, "a"), P("a"), None)},
    ),
    "a product with one vector": Program(
        run=lambda x, w, u: u @ (x @ w),
        args=(floats(128), floats(128, 256), floats(64, 256)),
        options={"in_shardings": (P("a"), P("a"), None)},
    ),
    "an array that is carried around a ring for products": Program(
        run=ring_of_products,
        args=(floats(64, 64), floats(64, 64)),
        options={"in_shardings": (P("a"), None)},
    ),
    "the largest elements of sharded rows": Program(
        run=lambda x: lax.top_k(x, 2),
        args=(floats(4, 16, 8),),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a", "b")},
    ),
    "an inferred spec that does not divide an argument": Program(
        run=lambda x, w: (jnp.sum(x), annotate(x * w, P(None, "a"))),
        args=(floats(2, 12), floats(2, 12)),
    ),
    "a dim with fewer elements than devices": Program(
        run=lambda x: jnp.transpose(x[0:1, 2:3, :], (2, 0, 1)) * 2 + jnp.sum(x),
        args=(floats(4, 8, 4),),
        options={"in_shardings": P(None, "a")},
    ),
    "an argument that is annotated unevenly": Program(
        run=lambda x: (annotate(x, P(("a", "b"))) * 2, x + 1),
        args=(floats(2, 4),),
        sizes={"a": 4, "b": 2},
    ),
    "a scalar that a loop does not use": Program(
        run=unused_sum, args=(floats(8), floats(4, 8)), options={"in_shardings": (P("a"), None)}
    ),
    "a reshape without a common factor": Program(
        run=lambda x: x.reshape(3, 8), args=(floats(4, 6),), sizes={"a": 2, "b": 4}, options={"in_shardings": P("a")}
    ),
    "a reshape in another order of dims": Program(
        run=lambda x: lax.reshape(x, (3, 8), dimensions=(1, 0, 2)),
        args=(floats(2, 3, 4),),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a"), "out_shardings": P(None, "a")},
    ),
    "a scatter into a replicated array": Program(
        run=rows_written_to_a_replicated_array,
        args=(floats(8, 8, 3), ints(5), floats(5, 8, 3)),
        options={"in_shardings": (P(), None, P(None, "a"))},
    ),
    "an annotation and an operand that need the same gather": Program(
        run=lambda x: (x @ x, annotate(x, P(None, "b"))),
        args=(floats(8, 8),),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a")},
    ),
    "a stack that is moved before a loop": Program(
        run=scan_of_a_moved_stack,
        args=(floats(4, 5),),
        sizes={"a": 2, "b": 4},
        options={"out_shardings": (P("a"), None)},
    ),
    "an unrolled loop": Program(
        run=lambda x: lax.scan(lambda c, _: (c * 2, c), x, None, length=4, unroll=2)[1],
        args=(floats(6),),
        sizes={"a": 4, "b": 2},
        options={"out_shardings": P("a")},
    ),
    "a broadcast scalar of two products": Program(
        run=shared_scalar,
        args=(floats(3, 1, 8), floats(3, 8, 8)),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": (None, P(None, None, "a"))},
    ),
    "a rotation whose result is sharded differently": Program(
        run=lambda x: annotate(jnp.roll(x.reshape(2, 4, 16), 1, 2), P(None, "b", "a")),
        args=(floats(8, 16),),
        sizes={"a": 4, "b": 2},
        options={"in_shardings": P(None, "b")},
    ),
    "a result of a sort that nothing reads": Program(
        run=lambda x, y: lax.sort((x, y), dimension=1)[1],
        args=(floats(8, 16), floats(8, 16)),
        options={"in_shardings": (P(None, "a"), P(None, "a"))},
    ),
    "an array reversed along two sharded dims": Program(
        run=lambda x: jnp.flip(x, (0, 1)),
        args=(floats(8, 8),),
        sizes={"a": 2, "b": 4},
        options={"in_shardings": P("a", "b")},
    ),
    "an array reversed along an uneven dim": Program(
        run=lambda x: annotate(jnp.flip(annotate(x, P("a")), 0), P("a")), args=(floats(11, 4),)
    ),
    "a replicated array reversed along a dim that becomes sharded": Program(
        run=lambda x: annotate(jnp.flip(x, 0), P("a")), args=(floats(8, 4),), options={"in_shardings": P()}
    ),
    "a replicated array padded along a dim that becomes sharded": Program(
        run=lambda x: annotate(jnp.pad(x, ((2, 2), (0, 0))), P("a")),
        args=(floats(12, 4),),
        options={"in_shardings": P()},
    ),
    "pooling to fewer rows than devices": Program(
        run=lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 1), ((0, 1), (0, 1))),
        args=(floats(8, 6),),
        options={"in_shardings": P("a")},
    ),
    "the gradient of pooling whose windows cross shards": Program(
        run=jax.grad(lambda x: jnp.sum(jnp.sin(lax.reduce_window(x, -jnp.inf, lax.max, POOL, POOL, "VALID")))),
        args=(floats(8, 2, 4, 4),),
        options={"in_shardings": P("a")},
    ),
    "a convolution whose halos reach beyond the neighbours": Program(
        run=lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (1,),
            "VALID",
            rhs_dilation=(2,),
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=8,
            precision="highest",
        ),
        args=(floats(4, 8, 8), floats(3, 1, 16)),
        sizes={"a": 4, "b": 2},
        options={"in_shardings": (P(None, "a"), P())},
    ),
    "a pad that grows the last shards": Program(
        run=lambda x: annotate(jnp.pad(annotate(x, P(None, "a")), ((0, 0), (0, 3))), P(None, "a")),
        args=(floats(24, 2),),
        sizes={"a": 2, "b": 4},
    ),
    "a gather of half an axis with uneven shards": Program(
        run=lambda x: annotate(jnp.pad(annotate(x, P("b")), ((1, 1), (0, 0))), P("b")) * 2,
        args=(floats(8, 5),),
        sizes={"a": 2, "b": 4},
        options={"out_shardings": P()},
    ),
    "a diagonal": Program(run=jnp.diagonal, args=(floats(8, 8),), options={"in_shardings": P("a")}),
    "an annotated constant that is read in another sharding": Program(
        run=lambda m, x: lax.select(
            m > 0, annotate(lax.broadcasted_iota(jnp.float32, (8, 8), 1) * 0.5, P(None, "a")), x
        ),
        args=(floats(8, 8), floats(8, 8)),
        options={"in_shardings": (P("a"), P("a"))},
    ),
    "a carry that is gathered in its loop and behind it": Program(
        run=lambda x, n: lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.cumsum(c[0], 0) / 8, c[1] + 1), (x, 0))[0],
        args=(floats(8, 4), ints()),
        options={"in_shardings": (P("a"), None), "out_shardings": P()},
    ),
    "a pad that cuts everything off": Program(
        run=lambda x: lax.pad(x, 0.0, ((2, -1, 0), (0, 0, 0))) + 1,
        args=(floats(1, 8),),
        options={"in_shardings": P(None, "a"), "out_shardings": P()},
    ),
    "a loop whose carry changes its sharding": Program(
        run=lambda x, rows: lax.scan(lambda c, r: (annotate(c * 2, P(None, "a")), r + 1), annotate(x, P("a")), rows),
        args=(floats(8, 8), floats(3, 8)),
    ),
    "a weight that two loops gather": Program(
        run=lambda w, x: (
            lax.scan(lambda h, r: (jnp.tanh(r + h @ w), None), x[0], x)[0]
            + lax.scan(lambda h, r: (jnp.sin(h @ w) + r, None), x[1], x)[0]
        ),
        args=(floats(16, 16), floats(4, 128, 16)),
        options={"in_shardings": (P("a"), P(None, "a"))},
    ),
    "an array that one product reads on its way to another": Program(
        run=products_of_an_array_gathered_and_moved,
        args=(floats(16, 32), floats(16, 64), floats(32, 64)),
        sizes={"a": 2, "b": 2, "idle": 2},
        options={"in_shardings": P("a", "b")},
    ),
    "integers minus themselves": Program(
        run=lambda x: ((x - x) + 1, x > x, x == x),
        args=(ints(8, 4),),
        options={"in_shardings": P("a"), "out_shardings": P()},
    ),
    "a carry that an annotation in the loop differs from": Program(
        run=lambda x: lax.fori_loop(0, 2, lambda i, c: annotate(jnp.sin(c), P("a")) * 2, x),
        args=(floats(5),),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize(("backend", "described"), COMPILERS.values(), ids=list(COMPILERS))
def test_as_compiled(name, backend, described):
    p = PROGRAMS[name]
    if name == "a weight that two loops gather" and jax.__version_info__ < (0, 12):
        pytest.skip("XLA:CPU of JAX 0.10.2 gathers it once per loop")
    predicted, compiled = predicted_and_compiled(p.run, p.args, backend, described, p.sizes, **p.options)
    assert predicted == compiled


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_one_device(name):
    p, rng = PROGRAMS[name], np.random.default_rng(0)
    args = [
        rng.integers(0, 8, x.shape).astype(x.dtype) if x.dtype == "int32" else rng.standard_normal(x.shape, x.dtype) / 4
        for x in p.args  # small, so that no loop of products magnifies what sums in another order differ by
    ]
    with sharding.mesh(p.sizes):
        ours = jax.tree.leaves(sharding.jit(p.run, **p.options)(*args))
    with sharding.mesh(dict.fromkeys(p.sizes, 1), devices=jax.devices()[:1]):
        alone = jax.tree.leaves(jax.jit(p.run)(*args))
    for one, other in zip(ours, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
