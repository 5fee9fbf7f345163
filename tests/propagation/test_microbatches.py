"""Microbatches keep the sharding of the batch that they are parts of, however a step takes it apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P

NUM, BATCH, LENGTH, FEATURES, HIDDEN, VOCAB = 4, 64, 8, 16, 64, 32
SPECS = {"table": P("fsdp", None), "up": P("fsdp", None), "down": P(None, "fsdp")}
EXAMPLES = P(("data", "fsdp"))
MESH = {"data": 2, "fsdp": 4}


def params():
    shapes = {"table": (VOCAB, FEATURES), "up": (FEATURES, HIDDEN), "down": (HIDDEN, VOCAB)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def tokens():
    return jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)


def loss(w, x):
    h = sharding.annotate(w["table"][x[:, :-1]], name="embedded")
    logits = jnp.tanh(h @ w["up"]) @ w["down"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), x[:, 1:, None], axis=-1).mean()


def added(w, found, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(jnp.add, found, (grads, value))


def nothing(w):
    return jax.tree.map(jnp.zeros_like, w), 0.0


def scanned(w, parts):
    """The step of a loader that makes microbatches: the reference of the others."""
    return jax.lax.scan(lambda found, x: (added(w, found, x), None), nothing(w), parts)[0]


def split(w, x):
    return scanned(w, x.reshape(NUM, -1, LENGTH))


def split_after_ops(w, x):
    return scanned(w, jnp.minimum(x.astype(jnp.int16), VOCAB - 1).astype(jnp.int32).reshape(NUM, BATCH // NUM, LENGTH))


def unrolled(w, x):
    parts, found = x.reshape(NUM, -1, LENGTH), nothing(w)
    for k in range(NUM):
        found = added(w, found, parts[k])
    return found


def indexed(w, x):
    parts = x.reshape(NUM, -1, LENGTH)
    return jax.lax.fori_loop(0, NUM, lambda k, found: added(w, found, parts[k]), nothing(w))


def sliced(w, x):
    size = BATCH // NUM

    def body(k, found):
        return added(w, found, jax.lax.dynamic_slice_in_dim(x, k * size, size))

    return jax.lax.fori_loop(0, NUM, body, nothing(w))


def mapped(w, x):
    """Losses of a large batch, some examples at a time: JAX splits it."""
    return jax.lax.map(lambda example: loss(w, example[None]), x, batch_size=BATCH // NUM)


FORMS = [split, split_after_ops, unrolled, indexed, sliced]


def jitted(f, spec=EXAMPLES, **options):
    return sharding.jit(f, in_shardings=(SPECS, spec), **options)


def completed(f, spec=EXAMPLES, shape=(BATCH, LENGTH), **options):
    with sharding.mesh(MESH, devices=8):
        return jitted(f, spec, **options).complete(params(), jax.ShapeDtypeStruct(shape, jnp.int32))


@pytest.fixture(scope="module")
def least():
    """The bytes that are sent where microbatches come sharded."""
    c = completed(scanned, P(None, ("data", "fsdp")), (NUM, BATCH // NUM, LENGTH))
    return c.communication().total_bytes


@pytest.mark.parametrize("step", FORMS)
def test_microbatches_are_sharded_as_the_batch(step, least):
    c = completed(step)
    assert c.spec("embedded") == EXAMPLES
    exchanged = 3 * NUM * BATCH * LENGTH * 4
    assert least <= c.communication().total_bytes <= least + exchanged
    assert completed(step, policy="shardy").communication().total_bytes > 2 * least


def test_a_map_over_batches_keeps_the_batch():
    assert completed(mapped).spec("embedded") == EXAMPLES


@pytest.mark.parametrize("step", [split, sliced, mapped])
def test_the_numbers_are_those_of_one_device(step):
    expected = jax.jit(step)(params(), tokens())
    with sharding.mesh(MESH):
        f = jitted(step)
        found, c = f(params(), tokens()), f.complete(params(), tokens())
        assert c.verify(f.lower(params(), tokens()).compile()).agrees
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_the_reason_names_the_batch_and_its_annotation():
    c = completed(split)
    text = str(c.why("embedded", dim=0))
    assert "in_shardings, of each microbatch" in text
    assert c.spec("x") == EXAMPLES


def test_axes_that_do_not_divide_a_microbatch_are_left_out():
    def of_six(w, x):
        return scanned(w, x.reshape(4, 6, LENGTH))

    c = completed(of_six, shape=(24, LENGTH))
    assert c.spec("embedded")[0] == "data"


def test_an_annotation_of_the_microbatches_stays():
    def annotated(w, x):
        return scanned(w, sharding.annotate(x.reshape(NUM, -1, LENGTH), P(None, "data")))

    assert completed(annotated).spec("embedded")[0] == "data"


def test_a_split_that_is_not_taken_apart_keeps_its_major_part_sharded():
    def all_at_once(w, x):
        parts = x.reshape(NUM, -1, LENGTH)
        return jax.vmap(loss, in_axes=(None, 0))(w, parts)

    embedded = completed(all_at_once).communication()
    kinds = {str(kind) for kind in embedded.by_kind()}
    assert "all-to-all" not in kinds and "collective-permute" not in kinds


def test_layers_of_a_split_weight_are_not_microbatches():
    """A stack of layers that is stored as one matrix is iterated over like a batch, but is none."""

    def of_layers(w, x):
        layers = w.reshape(NUM, FEATURES, FEATURES)
        return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, layers)[0].sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((NUM * FEATURES, FEATURES), (BATCH, FEATURES))]
    with sharding.mesh(MESH, devices=8):
        c = sharding.jit(of_layers, in_shardings=(P("fsdp"), P("data"))).complete(*shapes)
    assert not any("microbatch" in annotation.origin for annotation in c.assignment.graph.annotations.values())
