"""A stage's programs against ``jax.vjp``; residuals are small, and nothing is computed twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.pipeline.executors.activations import Activation, ActivationTree
from sharding.pipeline.executors.stage_programs import trace_stage

BATCH, TOKENS, FEATURES, HIDDEN = 3, 5, 7, 11  # all different, so that a shape identifies an array


def weights(chance=0):
    keys = jax.random.split(jax.random.key(chance), 3)
    return {
        "a": jax.random.normal(keys[0], (FEATURES, HIDDEN)) / 3,
        "b": jax.random.normal(keys[1], (HIDDEN, FEATURES)) / 3,
        "bias": jax.random.normal(keys[2], (FEATURES,)),
    }


def array(chance=1):
    return jax.random.normal(jax.random.key(chance), (BATCH, TOKENS, FEATURES))


def mlp(w, x):
    return x + jnp.tanh(x @ w["a"]) @ w["b"] + w["bias"].reshape(1, 1, -1)


def two_layers(w, x):
    return mlp(w, mlp(w, x))


def attention(w, x, dtype=jnp.bfloat16):
    """In bfloat16 with a causal mask."""
    half = jax.tree.map(lambda leaf: leaf.astype(dtype), w)
    h = x.astype(dtype) @ half["a"]
    scores = jnp.einsum("bth,bsh->bts", h, h)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    share = jax.nn.softmax(jnp.where(mask[None], scores, -1e4).astype(jnp.float32)).astype(dtype)
    return x + (share @ h @ half["b"]).astype(x.dtype)


def float32_attention(w, x):
    """In float32: in bfloat16, results depend on XLA's fusions."""
    return attention(w, x, jnp.float32)


def normalized(w, x):
    """With normalized weights."""
    unit = {name: leaf / jnp.sqrt((leaf**2).sum()) for name, leaf in w.items()}
    return mlp(unit, x)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (mlp(w, x), None), x, None, length=3)[0]


def custom_gradient(w, x):
    """With a custom gradient that differs from the derivative."""

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))
    return mlp(w, double(x))


TABLE = np.linspace(-1, 1, FEATURES, dtype=np.float32)


def with_constant(w, x):
    return mlp(w, x * jnp.asarray(TABLE).reshape(1, 1, -1))


def unused_weights(w, x):
    return x + w["bias"].reshape(1, 1, -1)


def same(w, x):
    return x


def constant(w, x):
    return jnp.ones_like(x)


def dropped(w, x):
    """With a PRNG key, integers and a sum among the activations."""
    h = mlp(w, x["h"])
    kept = jax.random.bernoulli(jax.random.fold_in(x["key"], x["stage"]), 0.5, h.shape)
    return {"h": h * kept, "key": x["key"], "stage": x["stage"] + 1, "sum": x["sum"] + (h**2).mean()}


def extra_inputs(_chance=1):
    zero = jnp.zeros((), jnp.int32)
    return {"h": array(), "key": jax.random.key(4), "stage": zero, "sum": jnp.ones(())}


STAGES = [mlp, two_layers, float32_attention, normalized, scanned, custom_gradient, with_constant, unused_weights, same]
STAGES += [constant, dropped]
POLICIES = {
    "none": lambda stage: stage,
    "all": lambda stage: jax.checkpoint(stage, prevent_cse=False),
    "default": jax.checkpoint,
    "dots": lambda stage: jax.checkpoint(stage, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable),
}


def inputs(stage_fn):
    return extra_inputs() if stage_fn is dropped else array()


def expected(stage_fn, w, x, gradient):
    """From jax.vjp: output, gradients of the weights and of the floats of the input."""
    activation_tree = ActivationTree.of(x)
    activation = activation_tree.flatten(x)

    def run(w, floats):
        y = activation_tree.flatten(stage_fn(w, activation_tree.unflatten(Activation(floats, activation.others))))
        return y.floats, y.others

    y, vjp, others = jax.vjp(run, w, activation.floats, has_aux=True)
    return Activation(y, others), *vjp(gradient)


def close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, wanted)


@pytest.mark.parametrize(
    "policy", ["none", "default", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all", "dots"))]
)
@pytest.mark.parametrize("stage_fn", STAGES, ids=lambda stage: stage.__name__)
def test_programs_equal_vjp(stage_fn, policy):
    w, x = weights(), inputs(stage_fn)
    stage = trace_stage(POLICIES[policy](stage_fn), w, x)
    activation = stage.activation_tree.flatten(x)
    gradient = [jnp.cos(jnp.arange(leaf.size, dtype=leaf.dtype)).reshape(leaf.shape) for leaf in activation.floats]

    def run(w, activation):
        y, _, residuals = stage.forward(w, activation)
        dw, dx, _ = stage.backward(w, residuals, gradient)
        own_dx, _, saved = stage.backward_input(w, residuals, gradient)
        return y, (dw, dx), (stage.backward_weight(w, saved), own_dx)

    y, whole, parts = jax.jit(run)(w, activation)
    wanted = jax.jit(lambda w, x: expected(stage_fn, w, x, gradient))(w, x)
    close((y, *whole), wanted)
    close(parts, whole)


def test_integer_weights_have_zero_gradients():
    def shifted(w, x):
        return mlp(w["float"], x) + w["whole"].astype(x.dtype)

    w, x = {"float": weights(), "whole": jnp.full((BATCH, TOKENS, FEATURES), 2)}, array()
    stage = trace_stage(shifted, w, x)
    y, _, residuals = stage.forward(w, stage.activation_tree.flatten(x))
    dw, dx, _ = stage.backward(w, residuals, [jnp.ones_like(x)])
    wanted, vjp = jax.vjp(mlp, w["float"], x)
    assert dw["whole"].dtype == w["whole"].dtype
    assert not dw["whole"].any()
    close((y.floats[0] - 2, dw["float"], dx[0]), (wanted, *vjp(jnp.ones_like(x))))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stage_fn", [mlp, two_layers, attention, normalized], ids=lambda stage: stage.__name__)
def test_residuals_depend_on_the_microbatch(stage_fn, policy):
    """Every residual has a batch dim: no weights, casts of them, masks, or norms of weights."""
    stage = trace_stage(POLICIES[policy](stage_fn), weights(), array())
    sums = [(FEATURES,), (FEATURES, HIDDEN), (HIDDEN, FEATURES)]
    for shape in stage.residual_shapes:
        assert BATCH in shape.shape
    own = dict.fromkeys(map(id, stage.weight_program.outputs))
    for var, shape in zip(stage.weight_program.inputs[len(weights()) :], stage.saved_shapes, strict=True):
        # Except weight gradients that backward-input computes anyway.
        assert BATCH in shape.shape or (id(var) in own and shape.shape in sums)


def test_full_remat_saves_only_the_input():
    stage = trace_stage(POLICIES["all"](attention), weights(), array())
    assert [shape.shape for shape in stage.residual_shapes] == [(BATCH, TOKENS, FEATURES)]


def test_a_policy_saves_its_residuals():
    stage = trace_stage(POLICIES["dots"](mlp), weights(), array())
    assert sorted(shape.shape for shape in stage.residual_shapes) == [
        (BATCH, TOKENS, FEATURES),
        (BATCH, TOKENS, HIDDEN),
    ]


def test_cheap_residuals_are_rematerialized():
    """For a tanh GELU its input and the tanh; for a residual stream its start and the added terms."""

    def gelu(w, x):
        return x + jax.nn.gelu(x @ w["a"]) @ w["b"]

    rows, hidden = (BATCH, TOKENS, FEATURES), (BATCH, TOKENS, HIDDEN)
    kept = [shape.shape for shape in trace_stage(gelu, weights(), array()).residual_shapes]
    assert sorted(kept) == sorted([rows, hidden, hidden])

    def stream(w, x):
        x = x + jnp.tanh(x @ w["a"] @ w["b"])
        return x + jnp.tanh(x @ w["a"] @ w["b"])

    kept = [shape.shape for shape in trace_stage(stream, weights(), array()).residual_shapes]
    assert sorted(kept) == sorted([*[rows] * 3, *[hidden] * 2])


def products(program):
    return sum(eqn.primitive.name == "dot_general" for eqn in program.eqns)


@pytest.mark.parametrize(("policy", "again"), [("none", 0), ("all", 3), ("default", 3), ("dots", 0)])
def test_a_split_backward_computes_nothing_twice(policy, again):
    """Per layer two products for the input, two for the weights; remat repeats those of the forward except the
    last, whose result is unused."""
    stage = trace_stage(POLICIES[policy](two_layers), weights(), array())
    assert products(stage.forward_program) == 4
    assert products(stage.backward_program) == 8 + again
    assert products(stage.input_program) == 4 + again
    assert products(stage.weight_program) == 4


def test_no_duplicate_residuals():
    stage = trace_stage(two_layers, weights(), array())
    saved = stage.weight_program.inputs[len(weights()) :]
    assert len(set(saved)) == len(saved)
    kept = stage.forward_program.outputs[1:]
    assert len(set(kept)) == len(kept)
    rows, hidden = (BATCH, TOKENS, FEATURES), (BATCH, TOKENS, HIDDEN)
    # Per product its operand and the gradient of its result, which equals that of the sum it feeds.
    assert sorted(shape.shape for shape in stage.saved_shapes) == sorted([*[rows] * 4, *[hidden] * 4])
