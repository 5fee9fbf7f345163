"""Parameters of flax nnx with logical names: sharded when created, or annotated by one call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate, axis_rules

RULES = {"batch": "data", "embed": None, "mlp": "tensor"}
X, Y = (np.sin(np.arange(n, dtype=np.float32)).reshape(16, -1) for n in (16 * 8, 16 * 4))


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def waves(_, shape, dtype, **__):
    return jnp.asarray(0.3 * np.sin(np.arange(np.prod(shape))).reshape(shape), dtype)


class MLP(nnx.Module):
    """Two matrices with logical names, one bias without."""

    def __init__(self, rngs, up=("embed", "mlp"), down=("mlp", "embed"), **metadata):
        def init(names):
            return nnx.with_partitioning(waves, names, **metadata)

        self.up = nnx.Linear(8, 16, kernel_init=init(up), rngs=rngs)
        self.down = nnx.Linear(16, 4, kernel_init=init(down), use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


def unsharded(*args, **kwargs):
    with nnx.use_eager_sharding(False):
        return MLP(nnx.Rngs(0), *args, **kwargs)


def train_step(model, optimizer, x, y):
    loss, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(annotate(x, P("batch"))) - y) ** 2))(model)
    optimizer.update(model, gradients)
    return model, optimizer, loss


def annotated_step(model, optimizer, x, y):
    model, optimizer = annotate((model, optimizer))
    return train_step(model, optimizer, x, y)


def on_one_device():
    model = unsharded()
    with axis_rules(dict.fromkeys(RULES)):  # everything replicated
        return jax.jit(train_step)(model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X, Y)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["annotated", "eager"])
def test_a_step_on_the_mesh_is_that_of_one_device(how):
    expected = on_one_device()
    with axis_rules(RULES):
        model = unsharded() if how == "annotated" else MLP(nnx.Rngs(0))
        with nnx.use_eager_sharding(how == "eager"):
            optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step = sharding.jit(annotated_step if how == "annotated" else train_step, donate_argnums=(0, 1))
        c = step.complete(model, optimizer, X, Y)
        close(step(model, optimizer, X, Y), expected)
    for tree in ("model", "optimizer/opt_state/0/mu", "optimizer/opt_state/0/nu"):
        assert c.spec(f"{tree}/up/kernel") == P(None, "tensor")
        assert c.spec(f"{tree}/down/kernel") == P("tensor")
    assert c.spec("model/up/bias") == P("tensor")  # inferred: it has no metadata


def test_reasons_show_the_names():
    with axis_rules(RULES):
        model = unsharded()
        c = sharding.jit(lambda m, x: annotate(m)(x)).complete(model, X)
    assert str(c.why("m/up/kernel", dim=1)).endswith(": mlp -> tensor")
    reason = str(c.why("m/up/kernel", dim=0))
    assert ": closed by " in reason and reason.endswith(": embed -> replicated")


def test_reasons_of_sharded_parameters_show_the_names_too():
    with axis_rules(RULES):
        c = sharding.jit(lambda m, x: annotate(m)(x)).complete(MLP(nnx.Rngs(0)), X)
    last = str(c.why("m/up/kernel", dim=1)).splitlines()[-1]
    assert "the argument's sharding; annotate at test_flax_metadata.py" in last and last.endswith(": mlp -> tensor")


def test_annotated_eagerly_it_is_sharded(mesh):
    with axis_rules(RULES):
        model = annotate(unsharded())
    assert isinstance(model, MLP) and isinstance(model.up.kernel, nnx.Param)
    assert model.up.kernel.get_metadata()["out_sharding"] == ("embed", "mlp")
    assert model.up.kernel.get_value().sharding == NamedSharding(mesh, P(None, "tensor"))
    close(model, unsharded())


def test_flax_uses_the_rules_when_it_creates_parameters():
    with axis_rules(RULES):
        assert MLP(nnx.Rngs(0)).down.kernel.get_value().sharding.spec == P("tensor", None)
        abstract = nnx.eval_shape(lambda: MLP(nnx.Rngs(0)))
        assert abstract.up.kernel.get_value().sharding.spec == P(None, "tensor")
        c = sharding.jit(lambda key: nnx.state(MLP(nnx.Rngs(key)))).complete(jax.random.key(0))
        assert c.spec("out/up/kernel") == P(None, "tensor")
    with pytest.raises(ValueError, match="embed"):  # flax's error: the rules are no longer set
        MLP(nnx.Rngs(0))


def test_flax_gets_axes_of_the_current_mesh():
    rules = {"embed": P.UNCONSTRAINED, "mlp": ("tensor", "expert")}
    with axis_rules(rules, optional=["expert"]):
        assert MLP(nnx.Rngs(0)).up.kernel.get_value().sharding.spec == P(None, "tensor")


def test_rules_set_in_flax_are_kept():
    with nnx.logical_axis_rules((("embed", "data"), ("mlp", "data"))), axis_rules({"mlp": "tensor"}):
        assert MLP(nnx.Rngs(0)).up.kernel.get_value().sharding.spec == P("data", "tensor")
        with axis_rules({"embed": None}):
            assert MLP(nnx.Rngs(0)).up.kernel.get_value().sharding.spec == P(None, "tensor")


def test_rules_of_the_variable_itself():
    with axis_rules({"embed": None}):
        model = unsharded(sharding_rules=(("mlp", "data"),))
        assert annotate(model).up.kernel.get_value().sharding.spec == P(None, "data")


@pytest.mark.parametrize("names", [P("embed", "mlp"), ("embed", ("mlp",)), ("embed", "tensor"), (None, "mlp")])
def test_forms_of_metadata(names):
    with axis_rules(RULES):
        assert annotate(unsharded(up=names)).up.kernel.get_value().sharding.spec == P(None, "tensor")


def test_stacked_layers():
    with nnx.use_eager_sharding(False):
        make = nnx.vmap(lambda key: MLP(nnx.Rngs(key)), transform_metadata={nnx.PARTITION_NAME: "layers"})
        layers = make(jax.random.split(jax.random.key(0), 3))
    with axis_rules({**RULES, "layers": None}):
        assert annotate(layers).up.kernel.get_value().sharding.spec == P(None, None, "tensor")


def test_state_has_the_metadata_of_its_module():
    with axis_rules(RULES):
        state = annotate(nnx.state(unsharded()))
    assert state["up"]["kernel"].get_value().sharding.spec == P(None, "tensor")


def test_spec_given_to_annotate_takes_precedence():
    with axis_rules(RULES):
        model = annotate(unsharded(), P("data"))
    assert {x.sharding.spec for x in jax.tree.leaves(model)} == {P("data")}


def test_one_error_lists_all_unknown_names_with_their_paths():
    model = unsharded(up=("embd", "mlp"), down=("mpl", None))
    with axis_rules(RULES), pytest.raises(ShardingError, match=r"(?s)2 fail.*down/kernel.*'mpl'.*up/kernel.*'embd'"):
        annotate(model)


def test_names_without_rules_are_an_error():
    with pytest.raises(ShardingError, match=r"(?s)up/kernel.*'embed', which is not a mesh axis"):
        annotate(unsharded())


def test_metadata_that_is_no_spec_is_an_error():
    model = unsharded()
    model.up.kernel.set_metadata(out_sharding=7)
    with axis_rules(RULES), pytest.raises(ShardingError, match=r"(?s)up/kernel.*7, of type int"):
        annotate(model)
