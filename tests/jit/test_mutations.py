"""Arguments mutated in place: errors unless declared, and the step of flax nnx' documentation if they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sharding
from sharding import P, ShardingError

X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
Y = np.arange(8) % 4


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)  # a norm takes the mean off
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.up(x)))))


ADAM = optax.adam(0.01)


def parts():
    model = Model(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), metrics


def train_step(model, optimizer, metrics, batch):
    def loss_fn(model):
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["y"]).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return loss


def trained(step, steps=3):
    model, optimizer, metrics = parts()
    losses = [float(step(model, optimizer, metrics, {"x": X * (i + 1), "y": Y})) for i in range(steps)]
    return losses, jax.tree.leaves((nnx.state(model, nnx.Param, nnx.BatchStat), metrics.compute())), model


def test_the_step_of_the_documentation_trains_the_callers_objects():
    specs = (None, None, None, P("data"))
    losses, leaves, model = trained(sharding.jit(train_step, mutable=True, in_shardings=specs, donate_argnums=(0, 1)))
    expected, expected_leaves, _ = trained(nnx.jit(train_step))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for a, b in zip(leaves, expected_leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert int(model.dropout.rngs.count[...]) == 3


def test_a_step_compiles_once_and_its_state_keeps_its_sharding():
    traces = []

    def step(model, x):
        traces.append(1)
        model.kernel[...] = sharding.annotate(model.kernel[...], P(None, "tensor")) * 2
        return model(x).sum()

    model, jitted = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), sharding.jit(step, mutable="model")
    before = np.asarray(model.kernel[...])
    for _ in range(3):
        jitted(model, X)
    np.testing.assert_allclose(model.kernel[...], 8 * before)
    assert model.kernel[...].sharding.spec == P(None, "tensor")
    assert len(traces) == 1
    completion = jitted.complete(model, X)
    assert completion.spec("new/model/kernel") == completion.spec("model/kernel") == P(None, "tensor")
    model.bias[...] = jax.device_put(model.bias[...], P("tensor"))
    loss, (kernel,) = jitted.lower(model, X).compile()(model, X)
    assert loss.shape == () and kernel.sharding.spec == P(None, "tensor")


def test_undeclared_mutation_is_an_error_that_names_the_option():
    for mutable in (False, ("metrics",)):
        with pytest.raises(ShardingError, match=r"(?s)model/norm/mean was mutated.*mutable=True"):
            sharding.jit(train_step, mutable=mutable)(*parts(), {"x": X, "y": Y})


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_what_a_call_inside_passes_through_is_not_a_mutation(transform):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    step = sharding.jit(lambda model, x: transform(lambda m, x: m(x))(model, x))
    np.testing.assert_allclose(step(model, X), model(X), rtol=1e-5, atol=1e-6)

    def doubled(model, x):
        model.bias[...] += 1
        return model(x)

    with pytest.raises(ShardingError, match="model/bias was mutated"):
        sharding.jit(lambda model, x: transform(doubled)(model, x))(model, X)


def test_only_variables_are_written_back():
    def count(state):
        state["n"] += 1
        return state["n"]

    with pytest.raises(ShardingError, match=r"(?s)state/n was mutated, and is not an nnx.Variable") as error:
        sharding.jit(count, mutable=True)({"n": jnp.zeros(())})
    assert "mutable=True, to have" not in str(error.value)


class Tied(nnx.Module):
    """The head's weight is that of the table, and one layer is used by two names."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(8, 8, rngs=rngs)
        self.head = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.head.kernel = self.table.embedding
        self.layer = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.layer

    def __call__(self, x):
        h = self.again(jnp.tanh(self.layer(self.table(x))))
        return h @ self.head.kernel[...].T


def train_tied(model, optimizer, x):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), x).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def tied(*, untie=False):
    model = Tied()
    if untie:
        model.head.kernel = nnx.Param(model.head.kernel[...])
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


TX, TOKENS = optax.adam(1e-2), np.arange(16) % 8


@pytest.mark.parametrize("donate", [None, (0, 1)])
def test_a_variable_that_occurs_twice_is_one(donate):
    expected, state = nnx.jit(train_tied), tied()
    losses = [float(expected(*state, TOKENS)) for _ in range(3)]
    model, optimizer = tied()
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(train_tied, mutable=True, donate_argnums=donate, in_shardings=(None, None, P("data")))
        found = [float(step(model, optimizer, TOKENS)) for _ in range(3)]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert model.head.kernel is model.table.embedding and model.again is model.layer
    np.testing.assert_allclose(model.head.kernel[...], state[0].head.kernel[...], rtol=1e-4, atol=1e-5)


def test_a_call_with_variables_of_their_own_is_another_program():
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(train_tied, mutable=True)
        for _ in range(2):
            for untie in (False, True, False):
                state, like = tied(untie=untie), tied(untie=untie)
                losses = [(float(step(*state, TOKENS)), float(nnx.jit(train_tied)(*like, TOKENS))) for _ in range(2)]
                np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
                apart = np.abs(state[0].head.kernel[...] - state[0].table.embedding[...]).max()
                assert (apart > 1e-3) == untie
        assert step._cache_size() == 2


@pytest.mark.parametrize("path", ["table/embedding", "head/kernel"])
def test_an_annotation_of_one_name_is_one_of_the_other(path):
    model, optimizer = tied()
    specs = sharding.layout({f"*/{path}": P("tensor", None)})(model)
    with sharding.mesh(data=2, tensor=4):
        step = sharding.jit(train_tied, mutable=True, in_shardings=(specs, None, P("data")))
        step(model, optimizer, TOKENS)
        c = step.complete(model, optimizer, TOKENS)
        assert c.spec("model/table/embedding") == c.spec("model/head/kernel") == P("tensor")
        assert model.head.kernel[...].sharding.spec == P("tensor")


def test_names_of_one_variable_with_two_specs_are_an_error():
    model, optimizer = tied()
    specs = sharding.layout({"*/table/embedding": P("tensor", None), "*/head/kernel": P(None, "tensor")})(model)
    with (
        sharding.mesh(data=2, tensor=4),
        pytest.raises(ShardingError, match=r"(?s)occurs twice.*head/kernel.*one array"),
    ):
        sharding.jit(train_tied, mutable=True, in_shardings=(specs, None, None))(model, optimizer, TOKENS)


def test_a_mutable_argument_under_an_enclosing_trace():
    counter = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    step = sharding.jit(train_on, mutable=True)

    @nnx.jit
    def twice(model, x):
        return step(model, x) + step(model, x)

    expected = nnx.clone(counter)
    total = train_on(expected, X) + train_on(expected, X)
    np.testing.assert_allclose(twice(counter, X), total, rtol=1e-5)
    np.testing.assert_allclose(counter.bias[...], expected.bias[...], rtol=1e-5)


def train_on(model, x):
    model.bias[...] += model(x).mean(axis=0)
    return model(x).sum()


class Counted(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=nnx.Rngs(1))])
        self.calls = 0
        self.log = ()


def counted_step(model, x):
    model.eval() if model.calls % 2 else model.train()
    model.calls += 1
    model.log = (*model.log, model.calls)
    model.linear.bias[...] += 1
    return model.layers[0](model.linear(x)).sum()


@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_static_attributes_are_given_to_the_callers_object(outer):
    ours, theirs, jitted = Counted(), Counted(), outer(sharding.jit(counted_step, mutable="model"))
    for calls in (1, 2, 3):
        np.testing.assert_allclose(jitted(ours, X), nnx.jit(counted_step)(theirs, X), rtol=1e-4)
        assert (ours.calls, ours.log) == (theirs.calls, theirs.log) == (calls, tuple(range(1, calls + 1)))
        assert ours.layers[0].deterministic == theirs.layers[0].deterministic == (calls == 2)
    np.testing.assert_allclose(ours.linear.bias[...], theirs.linear.bias[...])


def test_a_program_without_static_changes_is_reused_after_one():
    traces = []

    def step(model, x):
        traces.append(1)
        model.eval()
        return model.layers[0](x)

    model, jitted = Counted(), sharding.jit(step, mutable=True)
    for _ in range(4):
        np.testing.assert_allclose(jitted(model, X), X)
    assert len(traces) == 2


def test_a_lost_static_attribute_is_an_error_that_names_it():
    with pytest.raises(ShardingError, match=r"(?s)model.calls was changed from 0 to 1.*mutable=True"):
        sharding.jit(counted_step)(Counted(), X)
    with pytest.raises(ShardingError, match=r"state/m/layers/0.deterministic was changed from False to True"):
        sharding.jit(lambda state, x: state["m"].eval() or state["m"].layers[0](x))({"m": Counted()}, X)


@pytest.mark.parametrize("mutable", [False, True])
def test_an_object_of_another_type_in_an_objects_place_is_an_error(mutable):
    class Twice(nnx.Module):
        def __init__(self, layer):
            self.kernel, self.bias = layer.kernel, layer.bias

    def step(model, x):
        model.linear = Twice(model.linear)
        return x @ model.linear.kernel

    with pytest.raises(ShardingError, match=r"(?s)model/linear: a Linear was replaced by a Twice.*return the changed"):
        sharding.jit(step, mutable=mutable)(Counted(), X)

    def returned(model, x):
        return step(model, x), model

    y, model = sharding.jit(returned)(Counted(), X)
    assert type(model.linear) is Twice
    np.testing.assert_allclose(y, X @ model.linear.kernel[...], rtol=1e-5, atol=1e-6)


def test_other_entries_in_the_functions_own_copy_of_a_container_are_no_change():
    def step(state):
        state["pair"] = tuple(state["pair"])
        state["m"] = [state["m"].linear.kernel]
        return state["m"][0][...] @ state["pair"][0]

    state = {"pair": [X, X], "m": Counted()}
    y = sharding.jit(step)(state)
    np.testing.assert_allclose(y, state["m"].linear.kernel[...] @ X, rtol=1e-5, atol=1e-6)
    assert type(state["pair"]) is list


def test_an_attribute_that_is_removed_or_none_is_no_change():
    def step(model, x):
        model.linear.bias = None
        del model.layers
        return x @ model.linear.kernel

    model = Counted()
    np.testing.assert_allclose(sharding.jit(step)(model, X), X @ model.linear.kernel[...], rtol=1e-5, atol=1e-6)
    assert model.linear.bias is not None


def test_parts_of_a_mutable_object_that_are_removed_or_none_are_so_for_the_caller():
    def step(model, x):
        model.linear.kernel[...] += 1
        model.linear.bias = None
        del model.layers
        return (x @ model.linear.kernel).sum()

    ours, theirs = Counted(), Counted()
    kernel, jitted = ours.linear.kernel, sharding.jit(step, mutable=True)
    np.testing.assert_allclose(jitted(ours, X), nnx.jit(step)(theirs, X), rtol=1e-5)
    assert ours.linear.bias is None and not hasattr(ours, "layers") and ours.linear.kernel is kernel
    np.testing.assert_allclose(kernel[...], theirs.linear.kernel[...])
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    ours, theirs = Counted(), Counted()  # the compiled program, again
    np.testing.assert_allclose(jitted(ours, X), nnx.jit(step)(theirs, X), rtol=1e-5)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.layers.pop(0),
        lambda model: model.layers.append(model.layers[0]),
        lambda model: setattr(model, "again", model.linear.bias),
    ],
)
def test_parts_of_a_mutable_object_that_move_are_an_error(move):
    def step(model, x):
        move(model)
        return model.linear(x)

    with pytest.raises(ShardingError, match=r"(?s)model.*: parts of a (List|Counted) were moved.*return the changed"):
        sharding.jit(step, mutable=True)(Counted(), X)


def test_a_new_value_in_an_object_that_lost_a_part_is_not_lost_silently():
    def step(model, x):
        model.linear.bias = None
        model.linear.kernel[...] += 1
        return x @ model.linear.kernel

    with pytest.raises(ShardingError, match=r"(?s)model/linear/kernel was mutated.*mutable=True"):
        sharding.jit(step)(Counted(), X)


def test_a_returned_object_keeps_its_static_attributes():
    def step(model, x):
        model.calls += 1
        return model, model.linear(x)

    model, jitted = Counted(), sharding.jit(step)
    for _ in range(2):
        model, _ = jitted(model, X)
    assert model.calls == 2


def test_static_data_of_other_pytrees_is_not_lost_silently():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        w: object
        n: int = dataclasses.field(default=0, metadata={"static": True})

    def step(state):
        state.n += 1
        return state.w * 2

    for mutable in (False, True):
        with pytest.raises(ShardingError, match="static data of a State was changed"):
            sharding.jit(step, mutable=mutable)(State(X))


class PartlyFrozen(nnx.Module):
    def __init__(self):
        self.frozen = nnx.Param(jnp.ones((8, 8)))
        self.w = nnx.Param(jnp.ones((8, 8)))


@pytest.mark.parametrize("made_on", ["one device", "the mesh"])
def test_a_donated_variable_without_a_new_value_stays(made_on, mesh):
    def step(model, x):
        model.w[...] += x @ model.frozen[...]
        return model.w[...].sum()

    model, expected = PartlyFrozen(), np.ones((8, 8), np.float32)
    if made_on == "the mesh":
        nnx.update(model, jax.device_put(nnx.state(model), jax.NamedSharding(mesh, P())))
    run = sharding.jit(step, mutable=True, donate_argnums=0)
    for _ in range(2):
        expected = expected + X @ np.ones((8, 8), np.float32)
        np.testing.assert_allclose(run(model, X), expected.sum(), rtol=1e-5)
    np.testing.assert_array_equal(model.frozen[...], np.ones((8, 8)))
    np.testing.assert_allclose(model.w[...], expected, rtol=1e-5)
    completion, compiled = run.complete(model, X), run.lower(model, X).compile()
    assert [list(completion.assignment.graph.names)[leaf] for leaf in completion.donated_leaves] == ["model/w"]
    assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes
