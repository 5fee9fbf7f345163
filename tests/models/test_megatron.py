"""The layout's few weight annotations compile to Megatron-LM's tensor parallelism."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import sharding
from sharding.cost import CompiledFacts, read_compiled
from sharding.models import gpt, layouts

SIZES = {"data": 2, "tensor": 4}
FORMS = [
    pytest.param(
        scan, remat, kv_heads, id=f"{'scan' if scan else 'unrolled'}-{'remat' if remat else 'plain'}-kv{kv_heads}"
    )
    for scan in (False, True)
    for remat in (False, True)
    for kv_heads in (8, 4)
]
QUICK = FORMS[:1] + FORMS[-1:]


def program(layers: int, scan: bool, remat: bool, kv_heads: int, *, backward: bool):
    """The loss of a GPT, or its value and gradients, with only the weights annotated."""
    config = gpt.Config(
        vocab=64,
        context=16,
        layers=layers,
        features=64,
        heads=8,
        kv_heads=kv_heads,
        mlp_features=128,
        scan=scan,
        remat=remat,
    )
    graph, params = nnx.split(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))))
    layout = sharding.layout(rule for rule in layouts.gpt(SIZES).rules if not rule.pattern.endswith("table"))

    def loss(params, tokens):
        return gpt.next_token_loss(nnx.merge(graph, layout.annotate(params)), tokens)

    f = sharding.jit(jax.value_and_grad(loss) if backward else loss, in_shardings=(None, layouts.batch(SIZES)))
    return f, (params, jax.ShapeDtypeStruct((16, 17), jnp.int32))


def arrays(facts: CompiledFacts, *, times: int) -> Counter:
    """Number of arrays per collective (kind, axes), of those executed `times` times."""
    return Counter((c.kind, c.axes) for c in facts.collectives if c.count == times)


def per_layer(scan: bool, remat: bool, kv_heads: int, *, backward: bool) -> Counter:
    """Collectives of one layer: those that a third layer adds, or those in the loop bodies."""

    def facts(layers: int) -> CompiledFacts:
        f, args = program(layers, scan, remat, kv_heads, backward=backward)
        return read_compiled(f.lower(*args).compile(), mesh=SIZES)

    with sharding.mesh(SIZES):
        if not scan:
            return arrays(facts(3), times=1) - arrays(facts(2), times=1)
        return arrays(facts(2), times=2)


def check(scan: bool, remat: bool, kv_heads: int) -> None:
    forward = per_layer(scan, remat, kv_heads, backward=False)
    both = per_layer(scan, remat, kv_heads, backward=True)
    assert forward == {("all-reduce", ("tensor",)): 2}
    # Six parameters per layer, four weights and two norm scales, are all-reduced over the batch axis.
    assert both == {("all-reduce", ("tensor",)): 4, ("all-reduce", ("data",)): 6}


@pytest.mark.parametrize(("scan", "remat", "kv_heads"), QUICK)
def test_a_layer_has_two_all_reduces_forward_and_four_with_backward(scan, remat, kv_heads):
    check(scan, remat, kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "remat", "kv_heads"), FORMS)
def test_every_form_of_the_model_has_the_same_all_reduces(scan, remat, kv_heads):
    check(scan, remat, kv_heads)


@pytest.mark.parametrize("scan", [False, True])
def test_every_activation_of_the_block_is_inferred(scan):
    f, args = program(2, scan, False, 4, backward=True)
    with sharding.mesh(SIZES):
        completion = f.complete(*args)
    graph, specs = completion.assignment.graph, completion.assignment.specs
    batch, length, features = 16, 16, 64
    by_shape = {}
    used = {v for op in graph.ops for v in op.operands}
    for op in graph.ops:
        for v in used.intersection(op.results):
            by_shape.setdefault(graph.shapes[v], set()).add(str(specs[v]))
    assert by_shape[batch, length, features] == {"[data, -, -]"}
    assert by_shape[batch, length, 128] == {"[data, -, tensor]"}
    assert by_shape[batch, length, 4, 4, 8] == {"[data, -, tensor, -, -]"}
    assert by_shape[batch, 4, 2, length, length] == {"[data, tensor, -, -, -]"}
    layer = "blocks" if scan else "blocks/1"
    lead = [None] if scan else []
    assert completion.spec(f"{layer}/mlp/w1") == P(*lead, None, "tensor")
    assert completion.spec(f"params/{layer}/mlp/w2") == P(*lead, "tensor")
    assert not completion.unknown
