"""A model split into stages computes the same outputs, with its parameters on the stages that use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding import pipeline
from sharding.errors import ShardingError
from sharding.models import gpt

WORDS = jnp.asarray(np.random.default_rng(0).integers(16, size=(2, 4)), jnp.int32)


class Layer(nnx.Module):
    def __init__(self, rngs, features=4):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, features)))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.w[...])


class Model(nnx.Module):
    """One table for both ends, a vector for each, and an unused one."""

    def __init__(self, layers=5):
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (16, 4)))
        self.start = nnx.Param(jnp.arange(4.0))
        self.scale = nnx.Param(jnp.arange(1.0, 5.0))
        self.spare = nnx.Param(jnp.ones(3))
        self.blocks = nnx.List([Layer(rngs) for _ in range(layers)])

    def before_blocks(self, words):
        return self.table[...][words] + self.start[...].reshape(1, 1, -1)

    def after_blocks(self, x):
        return (x * self.scale[...].reshape(1, 1, -1)) @ self.table[...].T

    def __call__(self, words):
        x = self.before_blocks(words)
        for block in self.blocks:
            x = block(x)
        return self.after_blocks(x)


@pytest.fixture(scope="module")
def model():
    return Model()


def whole(cut, params, inputs):
    """Stage after stage."""
    shared = (params["shared"],) if "shared" in params else ()
    x = cut.first_fn(params.get("first"), inputs, *shared)
    for stage in range(len(cut.sizes)):
        x = cut.stage_fn(jax.tree.map(lambda leaf, s=stage: leaf[s], params["stages"]), x)
    return cut.last_fn(params.get("last"), x, *shared)


def named(state):
    return {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (1, 3, 1), (1, 1, 1, 1, 1)], ids=str)
def test_stages_one_after_the_other_are_the_model(model, sizes):
    cut = pipeline.split(model, len(sizes), sizes=sizes, inputs=WORDS)
    wanted = model(WORDS)
    np.testing.assert_allclose(whole(cut, cut.params, WORDS), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(cut.merge(cut.params)(WORDS), wanted)


def test_default_sizes_are_even():
    assert pipeline.split(Model(5), 3).sizes == (2, 2, 1)
    assert pipeline.split(Model(4), 2).sizes == (2, 2)


def test_padding_is_never_used(model):
    cut = pipeline.split(model, 3, sizes=(1, 3, 1), inputs=WORDS)
    (leaf,) = jax.tree.leaves(cut.params["stages"])
    assert leaf.shape == (3, 3, 4, 4)
    assert not leaf[0, 1:].any()
    assert not leaf[2, 1:].any()
    wrong = jax.tree.map(lambda leaf: leaf.at[0, 1:].set(jnp.nan).at[2, 1:].set(jnp.nan), cut.params["stages"])
    found = whole(cut, {**cut.params, "stages": wrong}, WORDS)
    np.testing.assert_allclose(found, model(WORDS), rtol=1e-6, atol=1e-6)


def test_parameters_by_user(model):
    cut = pipeline.split(model, 2, inputs=WORDS)
    assert set(cut.params) == {"first", "last", "shared", "stages"}
    assert named(cut.params["first"]) == {"start", "spare"}
    assert named(cut.params["last"]) == {"scale"}
    assert named(cut.params["shared"]) == {"table"}


def test_without_inputs_both_ends_share_all(model):
    cut = pipeline.split(model, 2)
    assert set(cut.params) == {"shared", "stages"}
    assert named(cut.params["shared"]) == {"table", "start", "scale", "spare"}
    np.testing.assert_allclose(whole(cut, cut.params, WORDS), model(WORDS), rtol=1e-6, atol=1e-6)


def test_ends_and_layers_that_are_given(model):
    def first(model, words):
        return jnp.round(8 * model.table[...][words])  # integers, whose sums do not depend on their order

    def layer(layer, x):
        return x @ jnp.sign(layer.w[...])

    def last(model, x):
        return x * model.scale[...].reshape(1, 1, -1)

    cut = pipeline.split(model, 2, first=first, layer=layer, last=last, inputs=WORDS)
    x = first(model, WORDS)
    for block in model.blocks:
        x = layer(block, x)
    np.testing.assert_array_equal(whole(cut, cut.params, WORDS), last(model, x))
    assert named(cut.params["first"]) == {"table", "start", "spare"}
    assert named(cut.params["last"]) == {"scale"}
    assert "shared" not in cut.params


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("scan", "sizes"),
    [
        pytest.param(True, (2, 1), marks=pytest.mark.slow),
        (False, (2, 1)),
        pytest.param(True, (2, 2), marks=pytest.mark.slow),
        (True, (2, 2, 2)),
        pytest.param(False, (2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gpt(scan, sizes, tied):
    config = gpt.Config(
        vocab=16, context=4, layers=sum(sizes), features=8, heads=2, kv_heads=2, mlp_features=12, tied=tied, scan=scan
    )
    shapes = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shapes)
    chance = np.random.default_rng(2)
    state = jax.tree.map(lambda leaf: jnp.asarray(chance.normal(size=leaf.shape) / 2, leaf.dtype), state)
    model = nnx.merge(graph, state)
    cut = pipeline.split(model, len(sizes), inputs=WORDS)
    assert cut.sizes == sizes
    assert named(cut.params.get("shared", nnx.State({}))) == ({"embed/table"} if tied else set())
    merged = cut.merge(cut.params)
    assert jax.tree.structure(nnx.state(merged)) == jax.tree.structure(nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(merged), nnx.state(model))
    found, wanted = jax.jit(lambda: (whole(cut, cut.params, WORDS), model(WORDS)))()
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_shapes_are_cut_as_arrays_are(model):
    shapes = nnx.eval_shape(Model)
    for inputs in (None, WORDS, jax.ShapeDtypeStruct(WORDS.shape, WORDS.dtype)):
        found, wanted = (pipeline.split(each, 2, inputs=inputs) for each in (shapes, model))
        assert found.sizes == wanted.sizes
        assert jax.tree.structure(found.params) == jax.tree.structure(wanted.params)
        for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(wanted.params), strict=True):
            assert isinstance(a, jax.ShapeDtypeStruct)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
        merged = jax.eval_shape(found.merge, found.params)
        assert jax.tree.structure(nnx.state(merged)) == jax.tree.structure(nnx.state(model))


def refusal(*args, **options):
    with pytest.raises(ShardingError, match=r"pipeline\.split\(") as caught:
        pipeline.split(*args, **options)
    return str(caught.value)


def test_refusals(model):
    text = refusal(model, 2, layers="layers")
    assert "no attribute 'layers'" in text
    assert "layers=" in text
    text = refusal(model, 6)
    assert "5 layers for 6 stages" in text
    assert "stages=5 or fewer" in text
    text = refusal(model, 2, sizes=(3, 3))
    assert "2 stages of 6 layers; the model has 5" in text
    assert "2 positive integers with a sum of 5" in text
    assert "sizes (5, 0)" in refusal(model, 2, sizes=(5, 0))
    assert "sizes (2, 2, 1)" in refusal(model, 2, sizes=(2, 2, 1))


def test_layers_of_several_kinds():
    odd = Model(3)
    odd.blocks[2] = Layer(nnx.Rngs(0), features=6)
    assert "blocks[2] differs from blocks[0] in structure or shapes" in refusal(odd, 2)


def test_variables_that_are_not_parameters():
    counting = Model(2)
    counting.steps = nnx.BatchStat(jnp.zeros(()))
    text = refusal(counting, 2)
    assert "steps, not a parameter" in text
    assert "only variables of type nnx.Param" in text
    for name in "abc":
        setattr(counting, name, nnx.BatchStat(jnp.zeros(())))
    assert "a, b, c, steps, not parameters" in refusal(counting, 2)
    for name in "de":
        setattr(counting, name, nnx.BatchStat(jnp.zeros(())))
    assert "a, b, c, d and 2 more, not parameters" in refusal(counting, 2)


def test_a_model_without_ends():
    class Bare(nnx.Module):
        def __init__(self):
            self.blocks = nnx.List([Layer(nnx.Rngs(0))])

    text = refusal(Bare(), 1)
    assert "no method 'before_blocks'" in text
    assert "first=" in text
    text = refusal(Bare(), 1, first=lambda model, x: x)
    assert "no method 'after_blocks'" in text
    assert "last=" in text
