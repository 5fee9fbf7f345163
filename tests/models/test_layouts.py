"""Layouts reach every parameter they speak of, and a tensor axis costs a layer the promised reductions."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from sharding import P
from sharding.models import gpt, layouts

SMALL = gpt.Config(vocab=32, context=16, layers=2, features=32, heads=8, kv_heads=8, mlp_features=64)
U = P.UNCONSTRAINED
FORMS = [{}, {"scan": True}, {"tied": False, "positions": "learned"}]


def _model(**changes):
    return gpt.GPT(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))


def _specs(model, layout):
    leaves = jax.tree_util.tree_leaves_with_path(layouts.specs(model, layout))
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in leaves}


@pytest.mark.parametrize("changes", FORMS)
@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "fsdp"), ("data", "fsdp", "tensor")])
def test_every_rule_matches(changes, axes):
    specs = layouts.specs(_model(**changes), layouts.gpt(axes))
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


def test_rules_of_both_axes_are_joined():
    specs = _specs(_model(), layouts.gpt(("fsdp", "tensor")))
    assert specs["embed/table"] == P("tensor", "fsdp")
    assert specs["blocks/1/attention/out"] == P("tensor", U, "fsdp")


def test_stacked_layers_stay_open():
    specs = _specs(_model(scan=True), layouts.gpt(("tensor",)))
    assert specs["blocks/attention/qkv"] == P(U, U, "tensor", U, U)
    assert specs["embed/table"] == P("tensor", U)


def test_specs_have_the_tree_of_the_parameters():
    model = _model()
    specs = layouts.specs(model, layouts.gpt(("tensor",)))
    assert specs.embed.table.get_value() == P("tensor", U)
    assert specs.final_norm.scale.get_value() is None


def test_batch():
    assert layouts.batch(("data", "fsdp", "tensor")) == P(("data", "fsdp"))
    assert layouts.batch(("tensor", "data")) == P("data")
    assert layouts.batch(("tensor",)) == P(None)


@pytest.mark.parametrize("pattern", ["*/mlp/w1", "blocks/*/mlp/w1", "blocks/mlp/w1", "blocks/0/mlp/w1"])
def test_patterns_with_and_without_index(pattern):
    specs = _specs(_model(), (layouts.Rule(pattern, P("tensor", U)),))
    assert "blocks/0/mlp/w1" in specs
    assert specs.keys() <= {"blocks/0/mlp/w1", "blocks/1/mlp/w1"}


def test_an_unused_rule_is_an_error():
    layout = (*layouts.gpt(("tensor",)), layouts.Rule("*/mlp/w3", P(U, "tensor")), layouts.Rule("heads", P("tensor")))
    with pytest.raises(ValueError, match=r"'\*/mlp/w3', nearest are blocks/mlp/w\d.*; 'heads', nearest are"):
        layouts.specs(_model(), layout)


def test_a_rule_with_too_many_dims_is_an_error():
    with pytest.raises(ValueError, match=r"'\*/scale': .*norm1/scale has 1 dims, the spec .* has 2"):
        layouts.specs(_model(), (layouts.Rule("*/scale", P("tensor", U)),))


def _mesh(**axes):
    devices = np.array(jax.devices()).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _closed(mesh, spec):
    return NamedSharding(mesh, P(*(None if entry is U else entry for entry in spec or ())))


def _compiled(mesh, function, config):
    """Compiled text of `function(model, tokens)` with parameters placed by the layout."""
    model = jax.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    specs = layouts.specs(model, layouts.gpt(mesh.axis_names))
    places = jax.tree.map(lambda spec: _closed(mesh, spec), specs, is_leaf=lambda x: x is None or isinstance(x, P))
    batch = NamedSharding(mesh, layouts.batch(mesh.axis_names))
    with jax.set_mesh(mesh):
        step = jax.jit(function, in_shardings=(places, batch))
        return step.lower(model, jax.ShapeDtypeStruct((8, 17), jnp.int32)).compile().as_text()


def _count(text, shape):
    """Arrays of this shape that are all-reduced; combined reductions count one for each array."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return sum(result.count(shape) for result in results)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axes", [{"tensor": 8}, {"data": 2, "tensor": 4}])
def test_a_layer_reduces_twice_forward_and_twice_back(axes, remat):
    # [B / data, S, M] is the shape of the residual stream, which only the tensor axis reduces; outside of the layers
    # that is once for the embedding and once for the gradient of the head's input.
    shape = f"f32[{8 // axes.get('data', 1)},16,32]"
    backward = jax.value_and_grad(gpt.next_token_loss)
    for layers in (1, 3):
        config = dataclasses.replace(SMALL, layers=layers, remat=remat)
        assert _count(_compiled(_mesh(**axes), gpt.next_token_loss, config), shape) == 2 * layers + 1
        assert _count(_compiled(_mesh(**axes), backward, config), shape) == 4 * layers + 2
    scanned = dataclasses.replace(SMALL, layers=3, remat=remat, scan=True)
    assert _count(_compiled(_mesh(**axes), backward, scanned), shape) == 4 + 2
