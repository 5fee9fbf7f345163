"""Results as rows and tables: plain tuples that add up, equal layers in one row, conflicts with their cures."""

from html import escape

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P

LAYERS = {f"layer_{k}": {"up": (64, 256), "down": (256, 64)} for k in range(3)}
SHAPES = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), LAYERS, is_leaf=lambda x: isinstance(x, tuple)
)
X = jax.ShapeDtypeStruct((4096, 64), jnp.float32)


def loss(params, x):
    for p in params.values():
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def step():
    specs = {name: {"up": P("data"), "down": P(None, "data")} for name in LAYERS}
    return sharding.jit(jax.grad(loss), in_shardings=(specs, P("data")), policy="shardy")


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with sharding.mesh(data=8, one=1, devices="h100:1x8") as m:
        yield m


@pytest.fixture(scope="module")
def c(mesh):
    return step().complete(SHAPES, X)


@pytest.fixture(scope="module")
def results(c):
    return {"ledger": c.communication(), "memory": c.memory(), "estimate": c.estimate(), "conflicts": c.conflicts}


def test_rows_are_plain_and_add_up(results):
    for result in results.values():
        rows = result.rows()
        assert rows and all(type(row) is tuple and isinstance(row[0], str) for row in rows)
        assert all(isinstance(cell, str | int | float) for row in rows for cell in row)
    ledger, memory, estimate, conflicts = results.values()
    assert sum(row[3] for row in ledger.rows()) == ledger.total_bytes
    assert sum(row[1] for row in memory.rows()) == sum(a.num_bytes for a in memory.arrays)
    assert sum(row[4] for row in estimate.rows()) == pytest.approx(
        estimate.compute_seconds + estimate.communication_seconds
    )
    assert sum(row[6] for row in conflicts.rows()) == sum(one.bytes_lost for one in conflicts)
    assert [row[6] for row in conflicts.rows()] == sorted((row[6] for row in conflicts.rows()), reverse=True)


def test_named_layers_share_rows(results):
    ledger, memory, _, conflicts = results.values()
    causes = [row[5] for row in ledger.rows()]
    assert any("layer_*/up" in cause for cause in causes) and not any("layer_1" in cause for cause in causes)
    assert "params/layer_*/up (x3)" in [row[0] for row in memory.rows()]
    assert "params/layer_*/" in str(memory)
    assert len(conflicts.rows()) < len(conflicts) == sum(row[5] for row in conflicts.rows())
    assert "layer_*/" in str(conflicts) and not any("layer_1" in line for line in str(conflicts).splitlines())


def test_notebooks_show_every_row_and_no_axis_of_one_device(results):
    for result in results.values():
        html = result._repr_html_()
        assert all("<th style=" in html and str(column.name) in html for t in result.tables() for column in t.columns)
    assert "one" not in [row[0] for row in results["memory"].tables()[2].rows]


def test_notebooks_show_what_is_printed_below_tables(results):
    assert any("other people's programs" in note for note in results["memory"].notes())
    assert any("bound by" in note for note in results["estimate"].notes())
    for result in results.values():
        assert all(escape(note) in result._repr_html_() and note in str(result) for note in result.notes())


def test_the_cure_of_each_conflict_is_printed(results):
    conflicts = results["conflicts"]
    assert all(
        f"cure: {one.cure}" in str(conflicts).splitlines()[2 * k + 1] for k, one in enumerate(conflicts.grouped())
    )


def test_unknown_ops_and_explicit_shardings_are_tables():
    def hashed(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with sharding.mesh(devices=8, a=8):
        c = sharding.jit(lambda x, w: hashed(x) @ w, in_shardings=(P("a"), P(None, "a"))).complete(
            X, SHAPES["layer_0"]["up"]
        )
    ((op, line, gathers, runs, size, fix),) = c.unknown.rows()
    assert (op, runs, size) == ("pure_callback", 1, 4 * 4096 * 64)
    assert "test_result_tables.py" in line and gathers == "x [a, -]" and fix
    assert gathers in c.unknown._repr_html_()
    written = c.explicit()
    assert [row[:3] for row in written.rows()] == [(one.source, one.op, str(one.spec)) for one in written]
    assert all(row[3] in written._repr_html_() for row in written.rows())


def test_differences_are_a_table_of_numbers():
    with sharding.mesh(devices=8, a=8):
        one, other = (sharding.jit(jnp.sin, in_shardings=spec).complete(X) for spec in (P("a"), P(None, "a")))
    found = sharding.compare(one, other)
    names = [column.name for column in found.tables()[0].columns]
    assert len(set(names)) == len(names) and all(type(row[2]) is type(row[5]) is int for row in found.rows())
    assert all(note in found._repr_html_() and note in str(found) for note in found.notes())


def test_verification_is_a_table():
    with sharding.mesh(data=8):
        made = step()
        found = made.complete(SHAPES, X).verify(made.lower(SHAPES, X).compile())
    assert found.agrees and "as predicted" in found._repr_html_()
    assert {row[0] for row in found.rows()} == {*found.predicted, "peak memory"}
    kinds = {row[0]: row for row in found.rows()}
    assert all(kinds[k][1:] == (n, *[n], size, size) for k, (n, size) in found.predicted.items())


def test_cures():
    # One axis on two dims of a product; two axes on one dim; a closed dim; two annotations of one value.
    with sharding.mesh(a=2, b=4):
        product = sharding.jit(lambda x, w: x @ w, in_shardings=(P("a", None), P(None, "a")))
        (both,) = product.complete(X, SHAPES["layer_0"]["up"]).conflicts
        assert both.cure == (
            f"keep a on one of dim {both.kept.dim} of {both.kept.name} (in_shardings) "
            f"and dim {both.lost.dim} of {both.lost.name} (in_shardings), or let one of them wait (priority 1)"
        )
        added = sharding.jit(lambda x, y: x + y, in_shardings=(P("a"), P("b")))
        assert {one.cure for one in added.complete(X, X).conflicts} == {
            "shard dim 0 of y over (a) too (in_shardings), or dim 0 of x over (b) (in_shardings), "
            "or let one of them wait (priority 1)",
            "annotate float32[4096, 64] with (b) on dim 0",
        }
        closed = sharding.jit(lambda x, y: sharding.annotate(x + y, P(None, None)), in_shardings=(P("a"), P("a")))
        (one, *_) = closed.complete(X, X).conflicts
        assert one.cure.startswith("leave dim 0 of") and "annotate at" in one.cure
