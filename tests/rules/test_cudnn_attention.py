"""cuDNN's attention: what batch and heads are sharded with, and that they stay so under the H100 compiler."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from support.compilers import predicted_and_compiled

from sharding import P
from sharding.rules import Kind, cudnn_attention

HEADS = P("data", None, "tensor")


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


Q, KV, BIAS = shape(8, 64, 8, 64), shape(8, 64, 4, 64), shape(1, 8, 64, 64)


def attention(*args, **options):
    return jax.nn.dot_product_attention(*args, implementation="cudnn", **options)


def gradients(f, count):
    return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), argnums=tuple(range(count)))


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no jax_cuda13_plugin")
@pytest.mark.parametrize(
    "f, args, expected",
    [
        (attention, (Q, KV, KV), {}),
        (lambda *args: attention(*args, is_causal=True, local_window_size=(8, 0)), (Q, Q, Q), {}),
        (gradients(lambda *args: attention(*args, is_causal=True), 3), (Q, KV, KV), {}),
        (gradients(attention, 4), (Q, KV, KV, BIAS), {"all-reduce": 1}),  # the bias of all examples
        (
            lambda *args: attention(*args[:3], query_seq_lengths=args[3], key_value_seq_lengths=args[3]),
            (Q, KV, KV, shape(8, dtype=jnp.int32)),
            {},
        ),
    ],
    ids=["grouped queries", "window", "gradients", "gradient of a bias", "lengths"],
)
def test_batch_and_heads_stay_sharded(f, args, expected):
    sizes, specs = {"data": 2, "tensor": 4}, (HEADS, *[P()] * (len(args) - 1))
    predicted, compiled = predicted_and_compiled(f, args, "gpu", "h100:1x8", sizes, in_shardings=specs)
    assert {str(k): n for k, (n, _) in predicted.items()} == expected
    assert predicted == compiled


NONE = (0,)
"""The shape of an operand that an attention does without."""
OPERANDS = {"q": (2, 64, 8, 16), "k": (2, 32, 4, 16), "v": (2, 32, 4, 24), "bias": NONE, "q length": NONE,
            "k length": NONE, "q offset": NONE, "k offset": NONE, "k pages": NONE, "v pages": NONE}  # fmt: skip
RESULTS = {"out": (2, 64, 8, 24), "statistics": (2, 8, 64)}
PARAMS = {"layout": 0, "dropout_rate": 0.0}
FULL = {"bias": (2, 8, 64, 32), "q length": (2,), "k length": (2,)}


def heads_first(shapes):
    return {n: tuple(s[d] for d in (0, 2, 1, 3)) if n in ("q", "k", "v", "out") else s for n, s in shapes.items()}


def sharded_with(make, ins, outs, array, dim, params=PARAMS):
    """The dims of all arrays that are sharded if a dim of one is, by name, and the kind of that factor."""
    rule = make(list(ins.values()), list(outs.values()), params)
    names = [*ins, *(f"new {name}" for name in outs)]
    arrays = dict(zip(names, (*rule.operands, *rule.results), strict=True))
    factor = arrays[array][dim][0]
    return {f"{n} {d}" for n, dims in arrays.items() for d, own in enumerate(dims) if factor in own}, rule.kinds[factor]


def test_batch_and_heads_of_an_attention():
    make, ins, outs = cudnn_attention.forward, OPERANDS, {"out": RESULTS["out"]}
    assert sharded_with(make, ins, outs, "q", 0) == ({"q 0", "k 0", "v 0", "new out 0"}, Kind.PASS)
    assert sharded_with(make, ins, outs, "k", 2) == ({"q 2", "k 2", "v 2", "new out 2"}, Kind.PASS)
    for array, dim in (("q", 1), ("q", 3), ("k", 1), ("v", 3)):
        assert sharded_with(make, ins, outs, array, dim)[1] is Kind.REPLICATE
    ins, outs, params = heads_first(ins), heads_first(outs), PARAMS | {"layout": cudnn_attention.HEADS_FIRST}
    assert sharded_with(make, ins, outs, "q", 1, params) == ({"q 1", "k 1", "v 1", "new out 1"}, Kind.PASS)


def test_bias_and_lengths_of_each_example_are_sharded_with_it():
    make, ins = cudnn_attention.forward, OPERANDS | FULL
    batch = {"q 0", "k 0", "v 0", "bias 0", "q length 0", "k length 0", "new out 0", "new statistics 0"}
    assert sharded_with(make, ins, RESULTS, "q", 0) == (batch, Kind.PASS)
    assert sharded_with(make, ins, RESULTS, "q", 2)[0] == {
        "q 2",
        "k 2",
        "v 2",
        "bias 1",
        "new out 2",
        "new statistics 1",
    }
    shared = ins | {"bias": (1, 1, 64, 32), "k length": NONE}
    assert sharded_with(make, shared, RESULTS, "q", 0)[0] == batch - {"bias 0", "k length 0"}


def test_positions_of_a_bias_are_needed_whole_like_those_of_queries_and_keys():
    make, ins = cudnn_attention.forward, OPERANDS | FULL
    queries = {"q 1", "bias 2", "new out 1", "new statistics 2"}
    assert sharded_with(make, ins, RESULTS, "bias", 2) == (queries, Kind.REPLICATE)
    assert sharded_with(make, ins, RESULTS, "bias", 3) == ({"k 1", "v 1", "bias 3"}, Kind.REPLICATE)


def test_gradients_are_sharded_as_what_they_are_of():
    more = {"statistics": RESULTS["statistics"], "out": RESULTS["out"], "cotangent": RESULTS["out"]}
    ins = OPERANDS | FULL | {"bias": (1, 8, 64, 32)} | more
    outs = {name: ins[name] for name in ("q", "k", "v", "bias")}
    made = {"new q 0", "new k 0", "new v 0"}
    given = {"q 0", "k 0", "v 0", "q length 0", "k length 0", "statistics 0", "out 0", "cotangent 0"}
    assert sharded_with(cudnn_attention.backward, ins, outs, "q", 0) == (made | given, Kind.REDUCE)  # for the bias
    outs = {name: ins[name] for name in ("q", "k", "v")}
    assert sharded_with(cudnn_attention.backward, ins, outs, "q", 0) == (made | given, Kind.PASS)


@pytest.mark.parametrize("name", ["q offset", "v pages"])
def test_packed_and_paged_sequences_and_dropout_have_no_rule(name):
    ins, outs = OPERANDS | {name: (3,)}, list(RESULTS.values())[:1]
    more = [RESULTS["statistics"], RESULTS["out"], RESULTS["out"]]
    dropped = PARAMS | {"dropout_rate": 0.1}
    for given, params in ((ins, PARAMS), (OPERANDS, dropped)):
        assert cudnn_attention.forward(list(given.values()), outs, params) is None
        assert cudnn_attention.backward([*given.values(), *more], list(OPERANDS.values())[:3], params) is None
    assert cudnn_attention.forward([*OPERANDS.values(), (3,)], outs, PARAMS) is None  # operands nobody knows of
    assert cudnn_attention.backward(list(OPERANDS.values()), outs, PARAMS) is None
