"""`Completion.suggest`: an annotation that was taken away or misplaced is named first, with the costs that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.train_steps import hand_written
from support.train_steps.step import Sizes

import sharding
from sharding import P
from sharding.explain.candidate_annotations import candidates
from sharding.explain.suggestions import Suggestions

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
FLAT = {"data": 2, "tensor": 4}
GONE = None
"""No annotation at all."""


def leaf_names(specs) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda s: s is None or isinstance(s, P))
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


def completed(name: str, sizes: Sizes, leaf: str, spec) -> sharding.Completion:
    """A train step, with the spec of one leaf of its arguments replaced."""
    step = hand_written.STEPS[name]("weights", sizes)
    leaves, tree = jax.tree.flatten(step.specs, is_leaf=lambda s: s is None or isinstance(s, P))
    leaves[leaf_names(step.specs).index(leaf)] = spec
    with sharding.mesh(sizes):
        step_of = sharding.jit(step.run, in_shardings=jax.tree.unflatten(tree, leaves), donate_argnums=0)
        return step_of.complete(*step.args)


SPOILED = [
    ("blockwise attention", FLAT, "0/0/k", P("tensor"), "state/0/k"),
]
MORE = [
    ("experts", CUBE, "1", GONE, "batch"),
    ("experts", CUBE, "0/0/down", GONE, "state/0/down"),
    ("experts", CUBE, "0/0/down", P(None, "fsdp", "tensor"), "state/0/down"),
    ("experts", CUBE, "0/0/up", GONE, "state/0/up"),
    ("experts", CUBE, "0/0/up", P("fsdp", "tensor"), "state/0/up"),
    ("lstm", CUBE, "1", GONE, "batch"),
    ("lstm", CUBE, "0/0/h", GONE, "state/0/h"),
    ("lstm", CUBE, "0/0/h", P("tensor", "fsdp"), "state/0/h"),
    ("lstm", CUBE, "0/0/x", GONE, "state/0/x"),
    ("lstm", CUBE, "0/0/x", P("tensor", "fsdp"), "state/0/x"),
    ("lstm", FLAT, "1", GONE, "batch"),
    ("lstm", FLAT, "0/0/h", P("tensor"), "state/0/h"),
    ("lstm", FLAT, "0/0/x", P("tensor"), "state/0/x"),
    ("blockwise attention", FLAT, "1", GONE, "batch"),
    ("blockwise attention", FLAT, "0/0/q", P("tensor"), "state/0/q"),
    ("blockwise attention", FLAT, "0/0/v", P("tensor"), "state/0/v"),
    ("blockwise attention", FLAT, "0/0/o", P(None, None, "tensor"), "state/0/o"),
    ("u-net", CUBE, "1", GONE, "batch"),
    ("u-net", CUBE, "0/0/down2", GONE, "state/0/down2"),
    ("graph net", FLAT, "0/0/edge", GONE, "state/0/edge"),
]


@pytest.mark.parametrize(
    ("name", "sizes", "leaf", "spec", "value"),
    [*SPOILED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
)
def test_names_the_spoiled_annotation_first(name, sizes, leaf, spec, value):
    found = completed(name, sizes, leaf, spec).suggest(limit=1)
    assert [one.value for one in found] == [value]
    first = found[0]
    assert first.replaces == spec
    assert spec is None or first.line == "in_shardings"
    a, b = first.after, first.before
    assert a.sent_bytes < b.sent_bytes or a.peak_bytes < b.peak_bytes or a.argument_bytes < b.argument_bytes


def mlp(params, batch):
    hidden = jnp.tanh(batch @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch) ** 2)


def update(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(mlp)(params, batch))


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


PARAMS, BATCH = {"up": shape(64, 256), "down": shape(256, 64)}, shape(512, 64)


def of_update(specs=None, rows=None, **mesh) -> sharding.Completion:
    with sharding.mesh(**mesh):
        return sharding.jit(update, in_shardings=(specs, rows), donate_argnums=0).complete(PARAMS, BATCH)


def test_figures_are_those_of_the_completion_that_follows():
    c = of_update(data=8, devices="v5p:2x2x2")
    found = c.suggest()
    assert found and found[0].value == "batch" and found[0].spec == P("data")
    for one in found:
        follows = one.complete()
        assert one.after.sent_bytes == follows.communication().total_bytes
        assert one.after.peak_bytes == follows.memory().peak_bytes
        assert one.after.argument_bytes == follows.memory().argument_bytes
        assert one.after.seconds == follows.estimate("v5p:2x2x2").seconds
        assert one.before.sent_bytes == c.communication().total_bytes
        assert one.before.peak_bytes == c.memory().peak_bytes
        same = c.annotate(one.names[0], one.spec)
        assert same.assignment.specs == follows.assignment.specs
    assert "annotate batch as P('data',)" in str(found)
    assert "mlp" in found[0].line and "test_suggestions.py" in found[0].line


def test_a_replaced_annotation_is_replaced_for_its_gradient_too():
    def loss(params, batch):
        return mlp({"up": sharding.annotate(params["up"], P("tensor")), "down": params["down"]}, batch)

    def step(params, batch):
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))

    with sharding.mesh(data=2, tensor=4):
        specs = {"up": None, "down": P("tensor")}
        c = sharding.jit(step, in_shardings=(specs, P("data")), donate_argnums=0).complete(PARAMS, BATCH)
        first = c.suggest(limit=1)[0]
        assert (first.value, first.replaces) == ("params/up", P("tensor"))
        assert "test_suggestions.py" in first.line
        follows = first.complete()
        right = of_update({"up": P(None, "tensor"), "down": P("tensor")}, P("data"), data=2, tensor=4)
        assert first.spec == P(None, "tensor")
        assert follows.communication().by_kind() == right.communication().by_kind()


def features_first(params, tokens):
    x = params["table"][tokens]
    for w in params["layers"]:
        x = x + jax.nn.silu(x @ w["up"]) @ w["down"]
    return jnp.mean((x @ params["out"]) ** 2)


def test_a_table_whose_features_take_the_axis_of_the_batch():
    layer = {"up": shape(256, 1024), "down": shape(1024, 256)}
    params = {"table": shape(2048, 256), "layers": [layer, layer], "out": shape(256, 2048)}
    specs = {
        "table": P("model", "data"),
        "layers": [{"up": P("data", "model"), "down": P("model", "data")}] * 2,
        "out": P("data", "model"),
    }
    with sharding.mesh(data=2, model=4, devices="v5p:2x2x2"):
        step = sharding.jit(jax.grad(features_first), in_shardings=(specs, P("data")), policy="shardy")
        c = step.complete(params, shape(64, 128, dtype="int32"))
    assert c.conflicts
    first = c.suggest(limit=1)[0]
    assert "features_first" in first.line
    assert first.spec == P("data")
    assert 2 * first.after.sent_bytes < first.before.sent_bytes


def test_without_known_devices_there_are_no_times():
    found = of_update(data=8, devices=8).suggest(limit=1)
    assert found[0].value == "batch"
    assert found[0].before.seconds == found[0].after.seconds == 0
    assert "per step" not in str(found)


def test_an_axis_that_splits_nothing_is_said():
    found = of_update(rows=P("data"), data=2, tensor=4).suggest(limit=1)
    assert found.idle_axes == ("tensor",)
    assert str(found).startswith("axis 'tensor' splits none of the ")
    assert of_update(rows=P(("data", "tensor")), data=2, tensor=4).suggest(limit=1).idle_axes == ()


def test_a_program_without_arguments():
    with sharding.mesh(data=8):
        found = sharding.jit(lambda: jnp.ones((64, 64)) * 2).complete().suggest()
    assert len(found) <= 3


def test_a_program_of_a_few_bytes():
    """Nothing is sent, and a device holds as little as a byte."""
    with sharding.mesh(data=5, devices=5):
        for number in (5, 10):
            (found,) = sharding.jit(lambda x: x + x).complete(jnp.ones(number, jnp.int8)).suggest(limit=1)
            assert found.spec == P("data") and found.after.peak_bytes < found.before.peak_bytes


def test_nothing_to_save_on_one_device():
    found = of_update(data=1, devices=1).suggest()
    assert found == () and "no single annotation" in str(found)


def test_as_a_table():
    found = of_update(data=8, devices="v5p:2x2x2").suggest()
    (table,) = found.tables()
    assert [row[0] for row in table.rows] == [one.value for one in found]
    assert "annotations that would save most" in found._repr_html_()
    assert isinstance(found, Suggestions)


def test_refuses_devices_that_do_not_fit():
    with pytest.raises(sharding.ShardingError, match="v5p:2x2x1"):
        of_update(data=8, devices=8).suggest(hardware="v5p:2x2x1")


def test_each_candidate_divides_and_changes_something():
    c = of_update({"up": P(None, "tensor"), "down": None}, P("data"), data=2, tensor=4)
    seen = {c.assignment.specs}
    for one in candidates(c.assignment):
        assert one.assignment.specs not in seen
        seen.add(one.assignment.specs)
        for v in one.target.values:
            parts = [int(np.prod([c.assignment.sizes[a] for a in own])) for own in one.axes]
            assert all(n % k == 0 for n, k in zip(c.assignment.graph.shapes[v], parts, strict=True))
            assert one.assignment.specs[v].axes == one.axes
    assert len(seen) > 10


def test_parameters_come_before_optimizer_state_though_their_update_reads_them_too():
    def momentum(moments, params, batch):
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(mlp)(params, batch))
        return moments, jax.tree.map(lambda w, m: w - 0.1 * m, params, moments)

    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(momentum, in_shardings=(None, None, P("data")), donate_argnums=(0, 1))
        c = step.complete(PARAMS, PARAMS, BATCH)
    found = dict.fromkeys(one.target.names[0] for one in candidates(c.assignment))
    assert list(found)[:3] == ["params/down", "params/up", "batch"]  # then nothing is new for the moments
