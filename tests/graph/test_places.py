"""Unnamed values are found by the module and by the line that computes them."""

import pickle
from inspect import currentframe

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, ShardingError

LINES = {}


def here() -> int:
    frame = currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def layer(p, x):
    with jax.named_scope("mlp"):
        LINES["hidden"] = here() + 1
        hidden = jnp.tanh(x @ p["up"]) + 1.0
        with jax.named_scope("down"):
            return hidden @ p["down"]


def loss(params, x):
    with jax.named_scope("decoder"):
        for k, p in enumerate(params):
            with jax.named_scope(f"layer_{k}"):
                x = x + layer(p, x)
    LINES["loss"] = here() + 1
    return jnp.mean(x**2)


PARAMS = [{"up": floats(8, 32), "down": floats(32, 8)}] * 2
X = floats(16, 8)


SPECS = [(P(None, "tensor"), P("tensor"))] * 2


def complete(function=loss, specs=SPECS):
    of_params = [{"up": up, "down": down} for up, down in specs]
    with sharding.mesh(devices=8, data=2, tensor=4):
        return sharding.jit(function, in_shardings=(of_params, P("data"))).complete(PARAMS, X)


@pytest.fixture(scope="module", params=[loss, jax.grad(loss)], ids=["forward", "with the backward pass"])
def c(request):
    return complete(request.param)


def hidden():
    return f"test_places.py:{LINES['hidden']}"


def test_a_line_is_what_it_computes_for_others(c):
    assert c.spec(hidden()) == P("data", "tensor")
    assert c.spec(f"tests/graph/{hidden()}") == P("data", "tensor")
    found = c._places.find(hidden())
    assert [c.assignment.graph.shapes[v] for v in found.values()] == [(16, 32)] * 2
    assert list(found) == [f"{hidden()}/add#0", f"{hidden()}/add#1"]


def test_an_op_of_a_line(c):
    assert len(c._places.find(f"{hidden()}/tanh")) == 2
    both = c._places.find(f"{hidden()}/dot_general")
    assert c._places.find(f"{hidden()}/dot_general#1") == {f"{hidden()}/dot_general#1": list(both.values())[1]}
    assert not c._places.find(f"{hidden()}/dot_general#2") and not c._places.find(f"{hidden()}/sin")


@pytest.mark.parametrize("is_looped", [False, True], ids=["layers", "scanned layers"])
def test_when_an_op_of_a_place_runs(is_looped):
    """What is recomputed there, and what the backward pass computes: the forward ops of the place hide both."""

    def recomputed(params, x):
        if not is_looped:
            return jax.checkpoint(loss)(params, x)
        once = jax.checkpoint(lambda x: loss(params, x) * x)
        return jax.lax.scan(lambda x, _: (once(x), None), x, length=3)[0].mean()

    forward, c = complete(), complete(jax.grad(recomputed))
    counts = {
        "": 2,
        "/recomputed": 2,
        "/backward": 4 if is_looped else 3,
    }  # of `up` twice, and of the second layer's `x`
    found = {phase: c._places.find(f"{hidden()}{phase}/dot_general") for phase in counts}
    assert {phase: len(products) for phase, products in found.items()} == counts
    assert len({v for products in found.values() for v in products.values()}) == sum(counts.values())
    for phase, products in found.items():
        (place,) = {c._places.of(v) for v in products.values()}
        assert place.endswith(f"{hidden()}{phase}/dot_general")
        assert set(c._places.find(place).values()) == set(products.values())
    assert not forward._places.find(f"{hidden()}/recomputed")
    assert c.spec(f"{hidden()}/recomputed/tanh") == P("data", "tensor")


def test_gradients_have_the_same_places_whatever_is_recomputed():
    """So that what annotates them stands for the same arrays once less is kept."""
    kept, recomputed = complete(jax.grad(loss)), complete(jax.grad(jax.checkpoint(loss)))
    places = [
        {name: c.assignment.graph.shapes[v] for name, v in c._places.find(f"{hidden()}/backward/dot_general").items()}
        for c in (kept, recomputed)
    ]
    assert places[0] == places[1] != {}


def test_a_module_named_backward_is_that_module():
    def twice(x):
        with jax.named_scope("backward"):
            x = jnp.sin(x)
        return jnp.cos(x)

    with sharding.mesh(devices=8, data=8):
        c = sharding.jit(jax.named_scope("rnn")(twice)).complete(floats(16, 8))
    assert [*c._places.find("rnn/backward")] == ["rnn/backward/sin"]


@pytest.mark.parametrize("name", ["decoder/layer_0/mlp", "layer_1/mlp", "layer_*/mlp", "mlp", "mlp/down", "decoder"])
def test_a_module_is_what_it_computes_for_others(c, name):
    assert c.spec(name) == P("data")
    shapes = {c.assignment.graph.shapes[v] for v in c._places.find(name).values()}
    assert shapes == {(16, 8)}


def test_why_of_a_module(c):
    text = str(c.why("layer_1/mlp", dim=0))
    assert text.startswith("layer_1/mlp dim 0 is sharded over data:") and "in_shardings" in text
    assert "tensor" in str(c.why("layer_1/mlp/tanh", dim=1))


def test_layers_that_differ_are_listed():
    c = complete(specs=[(P(None, "tensor"), P("tensor")), (P(), P())])
    pattern = rf"(?s)2 values.*sharded differently.*{hidden()}/add#0: \[data, tensor\].*/add#1: \[data, -\]"
    with pytest.raises(ShardingError, match=pattern):
        c.spec(hidden())
    assert c.spec(f"{hidden()}/add#1") == P("data")


def test_annotating_a_line_is_annotating_it_in_the_program():
    c = complete(specs=[(None, None)] * 2)
    assert c.spec(hidden()) == P("data")
    annotated = c.annotate(hidden(), P(P.UNCONSTRAINED, "tensor"))
    assert annotated.spec(hidden()) == P("data", "tensor")
    assert annotated.in_shardings[0] == [{"up": P(None, "tensor"), "down": P("tensor")}] * 2


def test_annotating_several_shapes_lists_them():
    def two(x):
        return x @ x.T, (x * 2).sum(0)

    with sharding.mesh(devices=8, data=8):
        c = sharding.jit(jax.named_scope("both")(two)).complete(floats(16, 8))
        with pytest.raises(ShardingError, match=r"(?s)of different shapes.*both/dot_general: \[16, 16\]"):
            c.annotate("both", P("data"))
        assert c.annotate("both/dot_general", P("data")).out_shardings[0] == P("data")


def test_names_come_first_and_unknown_ones_are_errors(c):
    assert c.spec("up") == P(None, "tensor")
    near = {"decoder/layer_2": "decoder/layer_1", "test_places.py:1": hidden(), "elsewhere.py:3": ""}
    for name, suggested in near.items():
        with pytest.raises(ShardingError, match="the module or the line that computes it") as caught:
            c.spec(name)
        assert not suggested or any(fix.startswith(suggested) for fix in caught.value.fix)


def test_values_in_loops():
    def looped(x):
        def body(x, _):
            with jax.named_scope("inner"):
                LINES["body"] = here() + 1
                return jnp.sin(x) * 2, None

        return jax.lax.scan(body, x, length=3)[0]

    with sharding.mesh(devices=8, data=8):
        c = sharding.jit(looped, in_shardings=P("data")).complete(X)
    assert c.spec(f"test_places.py:{LINES['body']}") == c.spec("inner/sin") == P("data")


def block(p, x):
    """A block as frameworks without name scopes trace it: its parameters have paths, its ops have no module."""
    hidden = jax.nn.silu(x @ p["mlp"]["up"]["kernel"].astype(x.dtype) + p["mlp"]["up"]["bias"][None])
    return x + p["norm"]["scale"][None] * (hidden @ p["mlp"]["down"]["kernel"])


def unscoped_step(model, mu, x):
    def loss(model):
        y = x
        for p in model["blocks"]:
            y = block(p, y)
        return jnp.mean((y @ model["head"]["kernel"]) ** 2)

    grads = jax.grad(loss)(model)
    mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
    return jax.tree.map(lambda p, m: 0.99 * p - m, model, mu), mu


@pytest.fixture(scope="module")
def unscoped():
    mlp = {"up": {"kernel": floats(8, 32), "bias": floats(32)}, "down": {"kernel": floats(32, 8)}}
    one = {"mlp": mlp, "norm": {"scale": floats(8)}}
    model = {"blocks": [one, one], "head": {"kernel": floats(8, 4)}}
    with sharding.mesh(devices=8, data=2, tensor=4):
        step = sharding.jit(
            unscoped_step, in_shardings=(sharding.layout({"*/up/kernel": P(None, "tensor")}), None, P("data"))
        )
        return step.complete(model, model, X)


@pytest.mark.parametrize(
    "name, ops, shape",
    [
        ("blocks/0/mlp/up", ["add"], (16, 32)),
        ("model/blocks/*/mlp/up", ["add#0", "add#1"], (16, 32)),
        ("mlp/down", ["dot_general#0", "dot_general#1"], (16, 8)),
        ("blocks/1/mlp", ["dot_general#1"], (16, 8)),
        ("blocks/0", ["mul#1"], (16, 8)),
        ("blocks/0/norm/mul", [""], (16, 8)),
        ("head", ["dot_general"], (16, 4)),
    ],
)
def test_a_module_without_scopes_is_what_reads_its_parameters(unscoped, name, ops, shape):
    found = unscoped._places.find(name)
    assert [one.removeprefix(name).removeprefix("/") for one in found] == ops
    assert {unscoped.assignment.graph.shapes[v] for v in found.values()} == {shape}


def test_a_module_without_scopes_in_why_and_after_saving(unscoped, tmp_path):
    assert "in_shardings" in str(unscoped.why("blocks/0/mlp/up", dim=1))
    again = pickle.loads(pickle.dumps(unscoped))
    assert again.spec("blocks/0/mlp/up") == unscoped.spec("blocks/0/mlp/up") == P("data", "tensor")
    assert again._places.find(f"graph/test_places.py:{block.__code__.co_firstlineno + 2}")


def test_an_unknown_module_lists_the_nearest(unscoped):
    with pytest.raises(ShardingError, match="model/head"):
        unscoped.spec("model/haed")


def test_files_of_one_name_are_told_apart():
    functions = {}
    for folder, op in (("attention", "sin"), ("experts", "cos")):
        code = compile(f"def f(x):\n    return jnp.{op}(x)", f"/models/{folder}/model.py", "exec")
        exec(code, {"jnp": jnp}, functions.setdefault(folder, {}))
    with sharding.mesh(devices=8, data=8):
        f = sharding.jit(lambda x: functions["experts"]["f"](functions["attention"]["f"](x)))
        c = f.complete(floats(16, 8))
    assert [*c._places.find("model.py:2")] == ["model.py:2/cos"]
    assert [*c._places.find("attention/model.py:2")] == ["attention/model.py:2/sin"]
    (sin,) = c._places.find("models/attention/model.py:2").values()
    assert c._places.of(sin) == "attention/model.py:2/sin"
