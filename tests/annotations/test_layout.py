"""Layouts: specs by path for models of any library, complete and checked."""

import equinox
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError
from sharding.annotations.layout import Rule

U = P.UNCONSTRAINED


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(jnp.tanh(linen.Dense(32, name="up")(x)))


class Nnx(nnx.Module):
    def __init__(self):
        self.up, self.down = (nnx.Linear(*dims, rngs=nnx.Rngs(0)) for dims in ((8, 32), (32, 8)))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def of_linen():
    model = Linen()
    return model.init(jax.random.key(0), jnp.ones((1, 8))), model.apply, "kernel"


def of_nnx():
    return Nnx(), lambda model, x: model(x), "kernel"


def of_nnx_state():
    graph, state = nnx.split(Nnx())
    return state, lambda state, x: nnx.merge(graph, state)(x), "kernel"


def of_haiku():
    shapes = {"mlp/~/up": (8, 32), "mlp/~/down": (32, 8)}
    params = {name: {"w": jnp.full(shape, 0.1), "b": jnp.zeros(shape[1])} for name, shape in shapes.items()}

    def apply(params, x):
        hidden = jnp.tanh(x @ params["mlp/~/up"]["w"] + params["mlp/~/up"]["b"][None])
        return hidden @ params["mlp/~/down"]["w"] + params["mlp/~/down"]["b"][None]

    return params, apply, "w"


class Equinox(equinox.Module):
    up: equinox.nn.Linear
    down: equinox.nn.Linear

    def __call__(self, x):
        return jax.vmap(lambda row: self.down(jnp.tanh(self.up(row))))(x)


def of_equinox():
    keys = jax.random.split(jax.random.key(0))
    model = Equinox(equinox.nn.Linear(8, 32, key=keys[0]), equinox.nn.Linear(32, 8, key=keys[1]))
    return model, lambda model, x: model(x), "weight"


@pytest.mark.parametrize("make", [of_linen, of_nnx, of_nnx_state, of_haiku, of_equinox])
def test_models_of_every_library(make):
    params, apply, name = make()
    up, down = (P("tensor", None), P(None, "tensor")) if name == "weight" else (P(None, "tensor"), P("tensor", None))
    layout = sharding.layout({f"up/{name}": up, f"*/down/{name}": down})
    x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
    with sharding.mesh(data=2, tensor=4):
        specs = layout(jax.eval_shape(lambda: params))
        found = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))
        assert sorted(map(str, found)) == sorted(map(str, (up, down)))
        step = sharding.jit(apply, in_shardings=(layout, P("data")))
        c = step.complete(params, x)
        assert not sharding.compare(c, sharding.jit(apply, in_shardings=(specs, P("data"))).complete(params, x))
        assert c.spec(f"up/{name}") == (P("tensor") if name == "weight" else P(None, "tensor"))
        assert {kind: n for kind, (n, _) in c.communication().by_kind().items()} == {"all-reduce": 1}
        np.testing.assert_allclose(step(params, x), apply(params, x), rtol=1e-5, atol=1e-6)
    assert len(layout.unmatched(params)) == 2
    assert all(path.endswith(("bias", "/b")) for path in layout.unmatched(params))


def test_a_layout_of_arguments_and_results():
    """One for all arguments, or in a pytree prefix; its patterns match in what is below it."""
    layout = sharding.layout({"up": P(None, "tensor"), "down": P("tensor")})
    params = {"up": floats(8, 32), "down": floats(32, 8), "bias": floats(8)}
    optimizer = {"mu": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}

    def step(params, optimizer):
        return jax.tree.map(lambda x: x + 1, params), optimizer

    with sharding.mesh(devices=8, tensor=8):
        for given in (layout, (layout, None), (None, {"mu": layout, "count": None})):
            c = sharding.jit(step, in_shardings=given, out_shardings=(layout, None)).complete(params, optimizer)
            assert c.spec("out/0/up") == P(None, "tensor")
            assert c.spec("params/up") == P(None, "tensor")
            assert c.spec("optimizer/mu/down") == (P() if given == (layout, None) else P("tensor"))
            assert c.spec("params/bias") == P()
        with pytest.raises(ShardingError, match="layout rule 'up'"):
            sharding.jit(step, in_shardings=(None, {"mu": None, "count": layout})).complete(params, optimizer)


def test_the_specs_are_plain_jax_with_a_last_rule_for_the_rest():
    params, apply, _ = of_haiku()
    layout = sharding.layout({"up/w": P(None, "tensor"), "*": P()}, strict=True)
    with sharding.mesh(tensor=8) as mesh:
        specs = jax.tree.map(lambda s: NamedSharding(mesh, s), layout(params), is_leaf=lambda s: isinstance(s, P))
        compiled = jax.jit(apply, in_shardings=(specs, None)).lower(params, floats(16, 8)).compile()
    assert compiled.input_shardings[0][0]["mlp/~/up"]["w"].spec == P(None, "tensor")


def test_equal_layers_and_stacked_ones():
    each = {"kernel": floats(8, 32)}
    params = {"layer_0": each, "layer_1": each, "blocks": [each, each], "stack": {"kernel": floats(4, 8, 32)}}
    found = sharding.layout([Rule("kernel", P(None, "tensor"), trailing=True)])(params)
    assert found["layer_0"]["kernel"] == found["blocks"][1]["kernel"] == P(None, "tensor")
    assert found["stack"]["kernel"] == P(U, None, "tensor")
    assert sharding.layout({"blocks/kernel": P("data"), "layer_*": P("tensor"), "stack/*": None})(params) == {
        "layer_0": {"kernel": P("tensor", None)},
        "layer_1": {"kernel": P("tensor", None)},
        "blocks": [{"kernel": P("data", None)}] * 2,
        "stack": {"kernel": None},
    }


def test_the_first_rule_wins_and_later_ones_fill_what_it_leaves_open():
    params = {"a": floats(8, 8), "b": floats(8, 8)}
    found = sharding.layout({"a": P(U, "tensor"), "*": P("data", "other")})(params)
    assert found == {"a": P("data", "tensor"), "b": P("data", "other")}


def test_a_rule_behind_one_that_decides_all_it_matches_is_an_error():
    params = {"q": {"kernel": floats(8, 8)}, "o": {"kernel": floats(8, 8)}, "scale": floats(8)}
    column, row = P(None, "tensor"), P("tensor", None)
    with pytest.raises(
        ShardingError, match=r"(?s)layout rule 'o/kernel'.*'kernel' comes before.*'o/kernel' before 'kernel'"
    ):
        sharding.layout({"kernel": column, "o/kernel": row})(params)
    assert sharding.layout({"o/kernel": row, "kernel": column})(params)["o"]["kernel"] == row
    # Nothing is lost: equal specs, dims left open by the first rule, a last rule for the rest, one that may be unused.
    open_rows = P(None, P.UNCONSTRAINED)
    for rules in (
        {"kernel": column, "o/kernel": column},
        {"kernel": open_rows, "o/kernel": column},
        {"kernel": column, "scale": P(), "*": P()},
        [Rule("kernel", column), Rule("o/kernel", row, optional=True)],
    ):
        assert sharding.layout(rules)(params)["o"]["kernel"] == column


def test_leaves_that_are_no_arrays_are_left_alone():
    model = equinox.nn.MLP(8, 8, 32, 2, key=jax.random.key(0))
    layout = sharding.layout({"weight": P("tensor"), "bias": P()}, strict=True)
    specs = layout(model)
    assert specs.activation is None and specs.layers[0].weight == P("tensor", None)
    assert not layout.unmatched(model)


def test_moments_of_an_optimizer_match_like_their_parameters():
    params = {"up": {"kernel": floats(8, 32)}}
    found = sharding.layout({"up/kernel": P(None, "tensor")})((params, optax.adam(1e-3).init(params)))
    assert found[1][0].mu == found[1][0].nu == found[0] == {"up": {"kernel": P(None, "tensor")}}
    assert found[1][0].count is None


def test_annotate_in_a_step():
    params, apply, _ = of_haiku()
    layout = sharding.layout({"up/w": P(U, "tensor")})
    with sharding.mesh(data=2, tensor=4):
        c = sharding.jit(lambda p, x: apply(layout.annotate(p), x), in_shardings=(None, P("data"))).complete(
            params, floats(16, 8)
        )
    assert c.spec("down/w") == P("tensor") and "annotate at" in str(c.why("down/w", dim=0))


@pytest.mark.parametrize(
    ("rules", "strict", "match"),
    [
        ({"up/q": P("tensor")}, False, r"(?s)layout rule 'up/q'.*no match among 4 paths.*fix: +mlp/~/up/w"),
        ({"up/w": P(None, None, "tensor")}, False, r"up/w has 2 dims, .* has 3"),
        ({"up/q": P(), "b": P(None, "tensor")}, False, "2 failures"),
        ({"up/w": P("tensor")}, True, r"(?s)3 of 4 parameters that no pattern matches.*mlp/~/down/w.*\"\*\": None"),
        ({"up/w": P(None, "tensr")}, False, r"(?s)sharding.layout: mlp/~/up/w.*'tensr', which is not a mesh axis"),
        ({"up/w": P("tensor"), "down/*": P("tensor")}, False, r"(?s)down/b.*dim 0 of size 6 over .* 6 = 1 x 4 \+ 2"),
        ({"up/w": "tensor"}, False, "a value of type str"),
    ],
)  # fmt: skip
def test_errors(rules, strict, match):
    params = {"mlp/~/up": {"w": floats(8, 32), "b": floats(32)}, "mlp/~/down": {"w": floats(32, 6), "b": floats(6)}}
    with sharding.mesh(data=2, tensor=4), pytest.raises(ShardingError, match=match):
        sharding.layout(rules, strict=strict)(params)


def test_without_a_mesh_axes_are_checked_later():
    specs = sharding.layout({"w": P("tensor")})({"w": floats(6)})
    with sharding.mesh(devices=4, tensor=4), pytest.raises(ShardingError, match="6 = 1 x 4"):
        sharding.jit(lambda p: p["w"] * 2, in_shardings=(specs,)).complete({"w": floats(6)})


def test_a_pending_sum_is_no_spec_of_a_parameter():
    with pytest.raises(ShardingError, match=r"(?s)layout: 'w'.*unreduced over tensor"):
        sharding.layout({"w": P("data", unreduced={"tensor"})})
