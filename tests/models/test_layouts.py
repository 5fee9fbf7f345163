"""Layout rules match their parameters, and a tensor axis costs each layer the promised all-reduces."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError
from sharding.models import gpt, layouts

SMALL = gpt.Config(vocab=32, context=16, layers=2, features=32, heads=8, kv_heads=8, mlp_features=64)
U = P.UNCONSTRAINED
FORMS = [{}, {"scan": True}, {"tied": False, "positions": "learned"}]


def _model(**changes):
    return gpt.GPT(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def _specs(model, layout):
    leaves = jax.tree_util.tree_leaves_with_path(layout(model))
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in leaves}


@pytest.mark.parametrize("changes", FORMS)
@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "fsdp"), ("data", "fsdp", "tensor")])
def test_every_rule_matches(changes, axes):
    specs = layouts.gpt(axes)(_model(**changes))
    used = {axis for spec in jax.tree.leaves(specs) for axis in spec if axis is not U}
    assert used == set(axes) - {"data"}


def test_specs():
    specs = _specs(_model(), layouts.gpt(("tensor",)))
    assert specs == {
        "embed/table": P("tensor", U),
        **{f"blocks/{i}/attention/qkv": P(U, "tensor", U, U) for i in range(2)},
        **{f"blocks/{i}/attention/out": P("tensor", U, U) for i in range(2)},
        **{f"blocks/{i}/mlp/w1": P(U, "tensor") for i in range(2)},
        **{f"blocks/{i}/mlp/w2": P("tensor", U) for i in range(2)},
    }


def test_rules_of_both_axes_are_merged():
    specs = _specs(_model(), layouts.gpt(("fsdp", "tensor")))
    assert specs["embed/table"] == P("tensor", "fsdp")
    assert specs["blocks/1/attention/out"] == P("tensor", U, "fsdp")


def test_leading_dims_of_stacked_layers_are_unconstrained():
    specs = _specs(_model(scan=True), layouts.gpt(("tensor",)))
    assert specs["blocks/attention/qkv"] == P(U, U, "tensor", U, U)
    assert specs["embed/table"] == P("tensor", U)


def test_specs_have_the_tree_of_the_parameters():
    model = _model()
    specs = layouts.gpt(("tensor",))(model)
    assert specs.embed.table.get_value() == P("tensor", U)
    assert specs.final_norm.scale.get_value() is None


def test_mesh_axes_that_no_rule_shards_over_are_reported():
    with pytest.warns(UserWarning, match="no rule shards over the mesh axis 'model'; its rules .* 'fsdp', 'tensor'"):
        assert not layouts.gpt(("data", "model")).rules
    names = ["y", "b", "x", "a", "z", "c", "w"]
    with pytest.warns(UserWarning, match=", ".join(map(repr, sorted(names)))):
        layouts.gpt(("data", *names))


def test_batch():
    assert layouts.batch(("data", "fsdp", "tensor")) == P(("data", "fsdp"))
    assert layouts.batch(("tensor", "data")) == P("data")
    assert layouts.batch(("tensor",)) == P(None)


@pytest.mark.parametrize("pattern", ["*/mlp/w1", "blocks/*/mlp/w1", "blocks/mlp/w1", "blocks/0/mlp/w1"])
def test_patterns_with_and_without_index(pattern):
    specs = _specs(_model(), sharding.layout([layouts.rule(pattern, P("tensor", U))]))
    assert "blocks/0/mlp/w1" in specs
    assert specs.keys() <= {"blocks/0/mlp/w1", "blocks/1/mlp/w1"}


def test_unused_rules_are_errors_that_suggest_the_nearest():
    layout = sharding.layout(
        [*layouts.gpt(("tensor",)).rules, layouts.rule("*/mlp/w3", P(U, "tensor")), layouts.rule("heads", P("tensor"))]
    )
    with pytest.raises(ShardingError, match=r"(?s)rule '\*/mlp/w3'.*fix: +blocks/mlp/w\d.*rule 'heads'"):
        layout(_model())


def test_a_rule_with_too_many_dims_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)rule '\*/scale'.*norm1/scale has 1 dims, .* has 2"):
        sharding.layout([layouts.rule("*/scale", P("tensor", U))])(_model())


def _closed(mesh, spec):
    return NamedSharding(mesh, P(*(None if entry is U else entry for entry in spec or ())))


def _compiled(function, config, **axes):
    """Compiled HLO of `function(model, tokens)` under plain `jax.jit`, parameters sharded by the layout."""
    model = jax.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    with sharding.mesh(**axes) as mesh:
        specs = layouts.gpt(axes)(model)
        shardings = jax.tree.map(
            lambda spec: _closed(mesh, spec), specs, is_leaf=lambda x: x is None or isinstance(x, P)
        )
        step = jax.jit(function, in_shardings=(shardings, NamedSharding(mesh, layouts.batch(axes))))
        return step.lower(model, jax.ShapeDtypeStruct((8, 17), jnp.int32)).compile().as_text()


def _count(text, shape):
    """Number of all-reduced arrays of this shape; a combined all-reduce counts each of its arrays."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return sum(result.count(shape) for result in results)


@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("axes", [pytest.param({"tensor": 8}, marks=pytest.mark.slow), {"data": 2, "tensor": 4}])
def test_a_layer_all_reduces_twice_forward_and_twice_backward(axes, remat):
    # [B / data, S, M] is the local shape of the residual stream, all-reduced over the tensor axis only; outside the
    # layers once for the embedding and once for the gradient of the head's input.
    shape = f"f32[{8 // axes.get('data', 1)},16,32]"
    both = jax.value_and_grad(gpt.next_token_loss)
    config, deeper, scanned = (
        dataclasses.replace(SMALL, remat=remat, **changes) for changes in ({}, {"layers": 3}, {"scan": True})
    )
    assert _count(_compiled(gpt.next_token_loss, config, **axes), shape) == 2 * 2 + 1
    assert _count(_compiled(both, config, **axes), shape) == 4 * 2 + 2
    assert _count(_compiled(both, deeper, **axes), shape) == 4 * 3 + 2
    assert _count(_compiled(both, scanned, **axes), shape) == 4 + 2


def test_annotate_places_parameters():
    layout = layouts.gpt(("tensor",))
    with sharding.mesh(tensor=8):
        placed = jax.jit(lambda model: layout.annotate(model))(_model())
    assert placed.blocks[0].mlp.w1.sharding.shard_shape((32, 64)) == (32, 8)
    assert placed.blocks[1].attention.qkv.sharding.shard_shape((32, 8, 3, 4)) == (32, 1, 3, 4)
    assert placed.embed.table.sharding.shard_shape((32, 32)) == (4, 32)


def test_staged_layers_are_sharded_over_their_first_dim_and_open_along_the_others():
    state = nnx.state(_model(scan=True))
    with sharding.mesh(pipe=2, data=4):
        equations = jax.make_jaxpr(lambda state: jax.tree.leaves(layouts.staged(state)))(state).eqns
    specs = [eqn.params["spec"].dims for eqn in equations if eqn.primitive.name == "annotate"]
    assert [len(dims) for dims in specs] == [leaf.ndim for leaf in jax.tree.leaves(state["blocks"])]
    for first, *others in specs:
        assert first.axes == ("pipe",) and not first.open
        assert all(dim.open and not dim.axes for dim in others)
