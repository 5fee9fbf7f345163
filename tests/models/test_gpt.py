"""All variants of the model agree: stacked or not, rematerialised or not, grouped heads or repeated."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sharding import kernels
from sharding.models import gpt, text_generation

SMALL = gpt.Config(vocab=32, context=16, layers=2, features=32, heads=4, kv_heads=2, mlp_features=64)


@functools.partial(jax.jit, static_argnums=0)
def _init(config):
    return gpt.GPT(config, rngs=nnx.Rngs(0))


def _model(**changes):
    return _init(dataclasses.replace(SMALL, **changes))


@jax.jit
def _call(model, tokens, key=None):
    return model(tokens, key)


def _tokens(batch=2, length=16):
    return jax.random.randint(jax.random.key(7), (batch, length), 0, SMALL.vocab)


def _paths(model):
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): x for path, x in leaves}


def _stacked(params):
    """The leaves of an unrolled model under the paths of the scanned one."""
    out = {}
    for path, x in params.items():
        head, *rest = path.split("/")
        name = "/".join([head, *rest[1:]]) if head == "blocks" else path
        out.setdefault(name, []).append(x)
    return {name: jnp.stack(xs) if name.startswith("blocks") else xs[0] for name, xs in out.items()}


def _assert_close(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for path in a:
        error = jnp.linalg.norm((a[path] - b[path]).ravel()) / (jnp.linalg.norm(b[path].ravel()) + 1e-30)
        assert error < tolerance, f"{path}: {error}"


@jax.jit
def _value_and_grad(model, key=None):
    return jax.value_and_grad(gpt.next_token_loss)(model, _tokens(), key)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"positions": "learned", "tied": False}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "scan": True},
    ],
)
def test_shapes(changes):
    model = _model(**changes)
    logits = _call(model, _tokens())
    assert logits.shape == (2, 16, 32)
    assert logits.dtype == model.config.dtype
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    assert jnp.isfinite(logits).all()


def test_parameter_paths():
    def names(**changes):
        config = dataclasses.replace(SMALL, **changes)
        return _paths(jax.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))).keys()

    block = {"norm1/scale", "attention/qkv", "attention/out", "norm2/scale", "mlp/w1", "mlp/w2"}
    around = {"embed/table", "final_norm/scale"}
    assert names() == around | {f"blocks/{i}/{name}" for i in range(2) for name in block}
    assert names(scan=True) == around | {f"blocks/{name}" for name in block}
    assert names(tied=False, positions="learned") - names() == {"head/table", "embed/positions"}


def test_weight_shapes():
    paths = _paths(_model(scan=True))
    assert paths["blocks/attention/qkv"].shape == (2, 32, 2, 4, 8)
    assert paths["blocks/attention/out"].shape == (2, 4, 8, 32)
    assert paths["blocks/mlp/w1"].shape == (2, 32, 64)


def test_num_params_also_of_an_abstract_model():
    abstract = jax.eval_shape(lambda: gpt.GPT(gpt.PRESETS["gpt3-175b"], rngs=nnx.Rngs(0)))
    assert gpt.num_params(abstract) == pytest.approx(174.6e9, rel=1e-3)
    model = _model()
    assert gpt.num_params(model) == sum(x.size for x in jax.tree.leaves(model))


@pytest.mark.parametrize("name, params", [("gpt-tiny", 0.82e6), ("gpt-small", 124e6), ("gpt-xl", 1.56e9)])
def test_preset_sizes(name, params):
    model = jax.eval_shape(lambda: gpt.GPT(gpt.PRESETS[name], rngs=nnx.Rngs(0)))
    assert gpt.num_params(model) == pytest.approx(params, rel=0.01)


@pytest.mark.parametrize(("layers", "features", "billions"), [(96, 12_288, 174.6), (128, 25_600, 1008.0)])
def test_megatrons_parameter_count(layers, features, billions):
    """12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)): Narayanan et al., SC 2021 (2104.04473), equation 2.

    A layer here has 2 h fewer: its two norms have no biases. The formula omits the norm after the last layer.
    """
    vocab, context = 51_200, 2048
    sizes = dict.fromkeys(("heads", "kv_heads"), features // 128)
    config = gpt.Config(
        vocab=vocab, context=context, layers=layers, features=features, mlp_features=4 * features, biases=True,
        positions="learned", scan=True, **sizes,
    )  # fmt: skip
    found = gpt.num_params(jax.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    formula = 12 * layers * features**2 + 13 * layers * features + (vocab + context) * features
    assert found + 2 * layers * features - features == formula
    assert round(formula / 1e9, 1) == billions


def test_first_loss_is_near_that_of_a_uniform_guess():
    # Logits start with variance 1, which costs half a nat.
    logits = _call(_model(), _tokens())
    assert gpt.loss(logits[:, :-1], _tokens()[:, 1:]) == pytest.approx(math.log(SMALL.vocab) + 0.5, abs=0.2)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_causal(positions):
    model, tokens = _model(positions=positions), _tokens()
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % SMALL.vocab)
    before, after = _call(model, tokens), _call(model, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before[:, 9:] - after[:, 9:]).max(axis=(0, 2)) > 0).all()


def _reference_attention(x_SM, qkv_MGND, out_HDM, heads):
    """One head of one sequence at a time, without positions, in float64."""
    x, qkv, out = (np.asarray(a, np.float64) for a in (x_SM, qkv_MGND, out_HDM))
    groups, per_group = qkv.shape[1], heads // qkv.shape[1]
    total = np.zeros_like(x)
    for head in range(heads):
        weights = qkv[:, head // per_group]
        q, k, v = x @ weights[:, head % per_group], x @ weights[:, -2], x @ weights[:, -1]
        score = np.where(np.tri(len(x), dtype=bool), q @ k.T / math.sqrt(q.shape[1]), -np.inf)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        total += (weight / weight.sum(axis=1, keepdims=True)) @ v @ out[head]
    assert groups * per_group == heads
    return total


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_textbook_one(kv_heads):
    config = dataclasses.replace(SMALL, positions="learned", kv_heads=kv_heads)
    layer = gpt.Attention(config, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 16, 32))
    expected = _reference_attention(x[0], layer.qkv[...], layer.out[...], config.heads)
    np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_grouped_heads_are_repeated_heads():
    grouped = _model(positions="rotary")
    repeated = _model(kv_heads=4)
    for target, source in zip(repeated.blocks, grouped.blocks, strict=True):
        q, kv = source.attention.qkv[:, :, :-2], source.attention.qkv[:, :, -2:]
        q = q.reshape(32, 4, 1, 8)
        target.attention.qkv[...] = jnp.concatenate([q, jnp.repeat(kv, 2, axis=1)], axis=2)
        for name in ("norm1", "norm2", "mlp"):
            setattr(target, name, getattr(source, name))
        target.attention.out[...] = source.attention.out[...]
    repeated.embed = grouped.embed
    np.testing.assert_allclose(_call(repeated, _tokens()), _call(grouped, _tokens()), rtol=1e-4, atol=1e-5)


def test_rotation_preserves_norms_and_depends_on_distance_only():
    q, k = jax.random.normal(jax.random.key(0), (2, 8))
    same = jnp.broadcast_to(jnp.stack([q, k])[None, None, :, :], (1, 12, 2, 8))
    rotated = kernels.rotary(same)[0]
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(same[0], axis=-1), rtol=1e-5)
    score = rotated[:, 0] @ rotated[:, 1].T
    for distance in range(-11, 12):
        diagonal = jnp.diagonal(score, distance)
        np.testing.assert_allclose(diagonal, jnp.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5)
    assert not np.allclose(score[0, 0], score[0, 5], rtol=1e-2)


@pytest.mark.parametrize("key", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_scanned_is_unrolled(key):
    key = None if key is None else jax.random.key(key)
    unrolled, scanned = _model(dropout=0.2), _model(dropout=0.2, scan=True)
    stacked = _stacked(_paths(unrolled))
    for path, x in _paths(scanned).items():
        np.testing.assert_array_equal(x, stacked[path], err_msg=path)
    (value, grads), (scanned_value, scanned_grads) = _value_and_grad(unrolled, key), _value_and_grad(scanned, key)
    np.testing.assert_allclose(value, scanned_value, rtol=1e-6)
    _assert_close(_paths(scanned_grads), _stacked(_paths(grads)))


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_remat_changes_nothing(scan):
    key = jax.random.key(3)
    value, grads = _value_and_grad(_model(scan=scan, dropout=0.2), key)
    remat_value, remat_grads = _value_and_grad(_model(scan=scan, dropout=0.2, remat=True), key)
    np.testing.assert_allclose(value, remat_value, rtol=1e-6)
    _assert_close(_paths(remat_grads), _paths(grads))


@pytest.mark.parametrize("scan", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_follow_their_policies_in_turn(scan):
    value, grads = _value_and_grad(_model(scan=scan, layers=4), None)
    policies = jax.checkpoint_policies
    in_turn = (policies.save_only_these_names("qkv", "mlp_hidden"), policies.nothing_saveable)
    found, found_grads = _value_and_grad(_model(scan=scan, layers=4, remat=in_turn), None)
    np.testing.assert_allclose(found, value, rtol=1e-6)
    _assert_close(_paths(found_grads), _paths(grads))
    with pytest.raises(ValueError, match="multiple of the 3 policies"):
        _model(scan=True, layers=4, remat=(*in_turn, policies.nothing_saveable))


def test_remat_saves_the_attention_output_only():
    # The backward pass of a block recomputes neither the attention's output projection nor w2: 6 dots forward and 12
    # backward are 18 with everything saved; rematerialisation repeats qkv, the scores, the weighted values and w1.
    def dots(remat):
        jaxpr = jax.make_jaxpr(jax.grad(gpt.next_token_loss))(_model(layers=1, remat=remat), _tokens())
        return str(jaxpr).count("dot_general[")

    assert dots(remat=True) - dots(remat=False) == 4


def test_dropout_depends_on_the_key():
    model = _model(dropout=0.5)
    one = _call(model, _tokens(), jax.random.key(1))
    np.testing.assert_array_equal(one, _call(model, _tokens(), jax.random.key(1)))
    assert not np.array_equal(one, _call(model, _tokens(), jax.random.key(2)))
    np.testing.assert_array_equal(_call(model, _tokens()), _call(_model(), _tokens()))


def test_dropout_keeps_the_mean():
    x = jnp.ones((200, 200))
    dropped = gpt.dropout(x, 0.25, jax.random.key(0))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.75)}
    assert dropped.mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("positions", "grows"), [("rotary", True), ("learned", False)])
def test_slices_of_a_sequence_equal_one_call(positions, grows):
    model, tokens = _model(positions=positions), _tokens()

    @jax.jit
    def sliced(model, tokens):
        caches = [model.past(2, None if grows else 16) for _ in model.blocks]
        parts, start = [], jnp.int32(0)
        for part in jnp.split(tokens, (3, 10, 11), axis=1):
            x = model.before_blocks(part, start)
            for i, block in enumerate(model.blocks):
                x, caches[i] = block.continued(x, caches[i])
            parts.append(model.after_blocks(x))
            start += part.shape[1]
        return jnp.concatenate(parts, axis=1)

    np.testing.assert_allclose(sliced(model, tokens), _call(model, tokens), rtol=1e-5, atol=1e-6)


def test_slices_need_causal_attention():
    model = gpt.GPT(SMALL, rngs=nnx.Rngs(0), attention=functools.partial(gpt.Attention, attend=lambda q, k, v: q))
    with pytest.raises(ValueError, match="needs attend=causal_attention"):
        model.blocks[0].continued(jnp.zeros((2, 3, 32)), model.past(2))


def test_branches_can_be_replaced():
    class Nothing(nnx.Module):
        def __init__(self, config, *, rngs):
            pass

        def __call__(self, x_BSM):
            return jnp.zeros_like(x_BSM)

    model = gpt.GPT(SMALL, rngs=nnx.Rngs(0), attention=Nothing, mlp=Nothing)
    x = model.final_norm(model.embed(_tokens()))
    np.testing.assert_allclose(model(_tokens()), x @ model.embed.table[...].T, rtol=1e-5, atol=1e-6)


def test_loss_is_cross_entropy():
    logits, targets = jax.random.normal(jax.random.key(0), (2, 5, 32)), _tokens(length=5)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    np.testing.assert_allclose(gpt.loss(logits, targets), -picked.mean(), rtol=1e-6)
    assert gpt.loss(logits.astype(jnp.bfloat16), targets).dtype == jnp.float32


@functools.partial(jax.jit, static_argnames=("steps", "temperature"))
def _generate(model, prompt, seed, *, steps, temperature):
    return text_generation.generate(model, prompt, steps=steps, key=jax.random.key(seed), temperature=temperature)


def test_greedy_generation_takes_the_likeliest_next_token():
    # Nine steps exceed the context of eight: only the last eight tokens count then.
    model, prompt = _model(layers=1, context=8, positions="learned"), _tokens(length=3)
    out = _generate(model, prompt, 0, steps=9, temperature=0)
    for end in range(3, 12):
        window = out[:, max(0, end - 8) : end]
        padded = jnp.pad(window, ((0, 0), (0, 8 - window.shape[1])))
        logits = _call(model, padded)[:, window.shape[1] - 1]
        np.testing.assert_array_equal(out[:, end], jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(out[:, :3], prompt)


def test_generate_samples_by_the_key():
    def tokens(seed):
        return _generate(_model(layers=1), _tokens(length=3), seed, steps=12, temperature=1.0)

    assert tokens(0).shape == (2, 15)
    np.testing.assert_array_equal(tokens(0), tokens(0))
    assert not np.array_equal(tokens(0), tokens(1))
    assert (tokens(0) < SMALL.vocab).all()


def test_the_lower_the_temperature_the_likelier_the_next_token():
    model, prompt = _model(layers=1), _tokens(length=3)
    cold, greedy = (_generate(model, prompt, 0, steps=12, temperature=temperature) for temperature in (1e-6, 0))
    np.testing.assert_array_equal(cold, greedy)


def test_a_sequence_beyond_the_context_is_an_error():
    with pytest.raises(ValueError, match="17 tokens in a sequence exceed the context of 16"):
        _model()(_tokens(length=17))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"heads": 5, "kv_heads": 5}, "features=32 must be a multiple of heads=5"),
        ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"heads": 32, "kv_heads": 32}, "features / heads = 1 must be even"),
        ({"positions": "none"}, "positions='none' must be"),
        ({"dtype": "float16"}, "dtype='float16' must be"),
        ({"dropout": 1.0, "kv_heads": 3}, "multiple of kv_heads=3; dropout=1.0 must be at least 0"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kernels_have_the_loss_and_gradients_of_plain_jax(tied):
    """Attention, norms and cross entropy."""
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, 64)
    found = {}
    for choice in ("xla", "pallas"):
        config = dataclasses.replace(SMALL, kernels=choice, tied=tied, vocab=64, context=16)
        graph, state = nnx.split(gpt.GPT(config, rngs=nnx.Rngs(0)))

        def loss(state, graph=graph):
            return gpt.next_token_loss(nnx.merge(graph, state), tokens)

        found[choice] = jax.jit(jax.value_and_grad(loss))(state)
        assert ("kernel_call" in str(jax.make_jaxpr(loss)(state))) == (choice == "pallas")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found["pallas"], found["xla"])
