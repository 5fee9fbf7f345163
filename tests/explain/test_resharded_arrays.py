"""Arrays in memory that are resharded: the axes that they are sharded over then, and the line that asks for it."""

import jax
import jax.numpy as jnp

import sharding
from sharding import P


def completed(f, specs, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with sharding.mesh(data=2, fsdp=2, tensor=2, devices=8):
        return sharding.jit(f, in_shardings=specs).complete(*args)


def layer(w, x):
    h = x @ w
    return (h * h).sum()


def test_a_gathered_weight_stays_sharded_over_the_other_axes():
    c = completed(layer, (P("fsdp", "tensor"), P(("data", "fsdp"), None)), (512, 1024), (512, 512))
    (gathered,) = (a for a in c.memory().arrays if a.op == "all-gather")
    assert (gathered.name, gathered.num_bytes, gathered.axes) == ("w", 512 * 1024 * 4 // 2, ("tensor",))
    assert "test_resharded_arrays.py" in gathered.source and "(layer)" in gathered.source
    assert set(gathered.saved_bytes) == {"data", "fsdp"}


def test_a_weight_gathered_over_all_its_axes_is_sharded_over_none():
    c = completed(layer, (P("fsdp", None), P(("data", "fsdp"), None)), (512, 1024), (512, 512))
    (gathered,) = (a for a in c.memory().arrays if a.op == "all-gather")
    assert (gathered.name, gathered.num_bytes, gathered.axes) == ("w", 512 * 1024 * 4, ())
    assert "(layer)" in gathered.source


def test_an_exchanged_array_has_the_axes_after_the_exchange():
    def exchanged(x):
        h = sharding.annotate(jnp.sin(x), P("tensor", "data"))
        return sharding.annotate(h, P(None, "tensor")) * 2

    arrays = completed(exchanged, (P("tensor", "data"),), (512, 512)).memory().arrays
    before, after = (next(a for a in arrays if a.op in ops) for ops in ([""], ["all-to-all", "all-gather", "mul"]))
    assert before.axes == ("tensor", "data") and after.axes == ("tensor",)
