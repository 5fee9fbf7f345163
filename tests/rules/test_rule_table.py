"""Numerical checks of every rule of the table; `rule_reference.py` says what is checked for each equation."""

import itertools
import math
from functools import partial

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from support.rule_reference import check_rules, primitives

from sharding.graph import CALLS
from sharding.graph.build import HANDLERS
from sharding.rules import Kind, rule_for, rule_table
from sharding.rules.rule import Flow
from sharding.rules.rule_table import ELEMENTWISE, MOVES, RULES

generated = settings(
    derandomize=True, max_examples=8, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
)
sizes = st.sampled_from([1, 2, 3, 4, 6])


def array(*shape, seed=0, dtype=np.float32):
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    return (values > 0 if dtype is bool else values).astype(dtype)


@generated
@given(st.data())
def test_dot_general_with_any_dimension_numbers(data):
    batch, contract, left, right = (data.draw(st.lists(sizes, max_size=2)) for _ in range(4))
    lhs_order = data.draw(st.permutations(range(len(batch + contract + left))))
    rhs_order = data.draw(st.permutations(range(len(batch + contract + right))))
    n_batch, n_contract = len(batch), len(contract)

    def place(order):
        inverse = list(np.argsort(order)) if order else []
        return tuple(inverse[n_batch : n_batch + n_contract]), tuple(inverse[:n_batch])

    (lc, lb), (rc, rb) = place(lhs_order), place(rhs_order)
    lhs = array(*[(batch + contract + left)[i] for i in lhs_order])
    rhs = array(*[(batch + contract + right)[i] for i in rhs_order], seed=1)
    check_rules(lambda a, b: lax.dot_general(a, b, ((lc, rc), (lb, rb))), lhs, rhs)


@generated
@given(st.data())
def test_reshapes_that_merge_split_and_drop(data):
    primes = data.draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=4))

    def shape():
        dims = [1] * data.draw(st.integers(1, 4))
        for p in data.draw(st.permutations(primes)):
            dims[data.draw(st.integers(0, len(dims) - 1))] *= p
        return tuple(dims)

    a, b = shape(), shape()
    check_rules(lambda x: lax.reshape(x, b), array(*a))


@generated
@given(st.lists(sizes, min_size=1, max_size=4).flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))))
def test_transpose(case):
    shape, order = case
    check_rules(lambda x: lax.transpose(x, order), array(*shape))


@generated
@given(st.data())
def test_broadcast_in_dim(data):
    out = data.draw(st.lists(sizes, min_size=1, max_size=4))
    kept = sorted(data.draw(st.sets(st.integers(0, len(out) - 1))))
    shape = [out[d] if data.draw(st.booleans()) else 1 for d in kept]
    check_rules(lambda x: lax.broadcast_in_dim(x, tuple(out), tuple(kept)), array(*shape))


REDUCTIONS = (jnp.sum, jnp.prod, jnp.max, jnp.min)


@generated
@given(st.lists(sizes, min_size=1, max_size=3), st.sampled_from(REDUCTIONS), st.data())
def test_reductions(shape, op, data):
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    check_rules(lambda x: op(x, axis=axes), array(*shape))
    check_rules(lambda x: (jnp.all(x, axis=axes), jnp.any(x, axis=axes)), array(*shape, dtype=bool))
    check_rules(lambda x: jnp.argmax(x, axis=axes[0]), array(*shape))


@generated
@given(
    st.lists(sizes, min_size=1, max_size=3),
    st.sampled_from((lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)),
    st.data(),
)
def test_running_reductions(shape, op, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    check_rules(lambda x: op(x, axis=axis), array(*shape))
    check_rules(lambda x: lax.cumlogsumexp(x, axis=axis), array(*shape))


@generated
@given(st.lists(sizes, min_size=1, max_size=3), st.data())
def test_sort_of_several_operands_and_top_k(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    check_rules(lambda x, y: lax.sort((x, y), dimension=dim, num_keys=2), array(*shape), array(*shape, seed=1))
    check_rules(lambda x: lax.top_k(x, 1), array(*shape))


@generated
@given(st.data())
def test_convolutions(data):
    groups, kind = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from(["feature", "batch"]))
    feature, batch = (groups, 1) if kind == "feature" else (1, groups)
    lhs_order, rhs_order, out_order = (data.draw(st.permutations(range(4))) for _ in range(3))
    lhs, rhs = (2 * batch, 2 * feature, 6, 5), (2 * feature * batch, 2, 3, 2)
    options = {
        "window_strides": data.draw(st.sampled_from([(1, 1), (2, 1)])),
        "padding": data.draw(st.sampled_from(["SAME", "VALID", [(1, 0), (2, 2)]])),
        "lhs_dilation": data.draw(st.sampled_from([(1, 1), (2, 1)])),
        "rhs_dilation": data.draw(st.sampled_from([(1, 1), (1, 2)])),
    }
    if not isinstance(options["padding"], list):
        options["lhs_dilation"] = (1, 1)
    numbers = lax.ConvDimensionNumbers(*(tuple(np.argsort(o).tolist()) for o in (lhs_order, rhs_order, out_order)))
    x, w = array(*[lhs[i] for i in lhs_order]), array(*[rhs[i] for i in rhs_order], seed=1)

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, dimension_numbers=numbers, feature_group_count=feature, batch_group_count=batch, **options
        )

    check_rules(convolve, x, w)


def window(op, start):
    return lambda x: lax.reduce_window(x, start, op, (1, 2, 2), (1, 2, 1), "VALID")


PROGRAMS = {
    "embedding": (lambda t, i: jnp.take(t, i, axis=0, mode="clip"), array(6, 4), np.array([[0, 3], [5, 2]])),
    "embedding, filled": (lambda t, i: t.at[i].get(mode="fill", fill_value=0), array(6, 4), np.array([0, 3, 5, 7])),
    "its gradient": (
        lambda t, i: jax.grad(lambda t: jnp.sum(t[i] ** 2))(t), array(6, 4), np.array([[0, 3], [5, 2]]),
    ),
    "a column": (lambda x, i: x[:, i], array(4, 6), np.array([1, 3])),
    "batched gather": (jax.vmap(lambda x, i: x[i]), array(4, 6), np.array([1, 3, 0, 5])),
    "batched slices": (
        jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (2,))), array(4, 6), np.array([1, 3, 0, 2]),
    ),
    "batched scatter": (jax.vmap(lambda x, i: x.at[i].add(2.0)), array(4, 6), np.array([1, 3, 0, 5])),
    "take_along_axis": (
        lambda x, i: jnp.take_along_axis(x, i, axis=1), array(4, 6), np.array([[0, 3], [5, 2], [1, 1], [2, 4]]),
    ),
    "scatter": (lambda x, i, u: x.at[i].set(u), array(6, 4), np.array([1, 3]), array(2, 4)),
    "scatter-add": (lambda x, i, u: x.at[:, i].add(u), array(4, 6), np.array([1, 3]), array(4, 2)),
    "scatter-sub": (lambda x, i, u: x.at[i].subtract(u), array(4, 6), np.array([1, 3]), array(2, 6)),
    "scatter-mul": (lambda x, i, u: x.at[i].multiply(u), array(6, 4), np.array([1, 3]), array(2, 4)),
    "scatter-max": (lambda x, i: jax.ops.segment_max(x, i, 3), array(6, 4), np.array([0, 2, 1, 1, 0, 2])),
    "scatter-min": (lambda x, i: jax.ops.segment_min(x, i, 3), array(6, 4), np.array([0, 2, 1, 1, 0, 2])),
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 3), array(6, 4), np.array([0, 2, 1, 1, 0, 2])),
    "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), array(4, 6), np.int32(1)),
    "dynamic_update_slice": (
        lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), array(4, 6), array(2, 6), np.int32(1),
    ),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), array(4, 6), array(2, 6)),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0))), array(4, 6)),
    "pad inside": (lambda x: lax.pad(x, 0.0, ((0, 0, 1), (0, 0, 0))), array(4, 6)),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 6), (1, 1)), array(4, 6)),
    "strided slice": (lambda x: x[::2], array(4, 6)),
    "rev": (lambda x: lax.rev(x, (1,)), array(4, 6)),
    "split": (lambda x: jnp.split(x, 2, axis=1), array(4, 6)),
    "squeeze": (lambda x: jnp.squeeze(x, 1), array(4, 1, 6)),
    "expand_dims": (lambda x: lax.expand_dims(x, (1, 3)), array(4, 6)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), array(4, 6), array(4, 6, seed=1)),
    "unstack": (lambda x: jnp.unstack(x, axis=1), array(4, 2, 6)),
    "tile": (lambda x: jnp.tile(x, (2, 1, 3)), array(4, 6, 2)),
    "scalar predicate": (lambda p, x, y: lax.select_n(p, x, y), np.bool_(True), array(4, 6), array(4, 6, seed=1)),
    "select": (lambda x, y: jnp.where(x > 0, x, y), array(4, 6), array(4, 6, seed=1)),
    "clamp": (lambda x: lax.clamp(-1.0, x, 2.0), array(4, 6)),
    "clamp by arrays": (lambda x, y: lax.clamp(x - 1, y, x + 1), array(4, 6), array(4, 6, seed=1)),
    "bitcast": (lambda x: lax.bitcast_convert_type(x, jnp.int32), array(4, 6)),
    "bitcast, narrower": (lambda x: lax.bitcast_convert_type(x, jnp.int16), array(4, 6)),
    "bitcast, wider": (lambda x: lax.bitcast_convert_type(x, jnp.int32), array(4, 6, 2, dtype=np.int16)),
    "iota": (lambda x: x + lax.broadcasted_iota(jnp.float32, (4, 6), 1), array(4, 6)),
    "xor": (lambda x: lax.reduce_xor(x, (1,)), array(4, 6, dtype=np.int32)),
    "argmin": (lambda x: jnp.argmin(x, axis=0), array(4, 6)),
    "reduce": (
        lambda x, y: lax.reduce((x, y), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)),
        array(4, 6), array(4, 6, seed=1),
    ),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 10), array(4, 6)),
    "max pooling": (jax.grad(lambda x: jnp.sum(window(lax.max, -np.inf)(x) ** 2)), array(4, 4, 3)),
    "min pooling": (window(lax.min, np.inf), array(4, 4, 3)),
    "sum pooling": (jax.grad(lambda x: jnp.sum(window(lax.add, 0.0)(x) ** 2)), array(4, 4, 3)),
    "any pooling": (window(lambda a, b: a * b + a, 1.0), array(4, 4, 3)),
    "factorisations": (
        lambda x: (jnp.linalg.qr(x), lax.linalg.lu(x), lax.linalg.schur(x), jnp.linalg.svd(x)), array(4, 3, 3),
    ),
    "pivots": (lambda x: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(x)[1], 4), array(4, 3, 3)),
    "reflections": (
        lambda x, t: (lax.linalg.hessenberg(x), lax.linalg.householder_product(x, t)),
        array(4, 3, 3), array(4, 3, seed=1),
    ),
    "eigenvalues": (lambda x: (jnp.linalg.eigh(x + x.mT), jnp.linalg.eig(x)), array(2, 4, 4)),
    "positive matrices": (
        lambda x, y: (jnp.linalg.cholesky(x @ x.mT + jnp.eye(3)[None]), lax.linalg.symmetric_product(x, y)),
        array(4, 3, 3), array(4, 3, 3, seed=1),
    ),
    "tridiagonal": (
        lambda x, d, y: (lax.linalg.tridiagonal(x), lax.linalg.tridiagonal_solve(d, d + 9, d, y)),
        array(4, 3, 3), array(4, 3, seed=1), array(4, 3, 2, seed=2),
    ),
    "triangular": (
        lambda x, y: lax.linalg.triangular_solve(x + 9 * jnp.eye(3)[None], y, left_side=True, lower=True),
        array(4, 3, 3), array(4, 3, 2),
    ),
    "transforms": (
        lambda x: (jnp.fft.fft(x), jnp.fft.rfft2(x, axes=(1, 2)), jnp.fft.irfft(x, axis=2)), array(4, 6, 4),
    ),
    "approximate top": (lambda x: lax.approx_max_k(x, 2, reduction_dimension=1), array(4, 8)),
    "ragged rows": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 1, 3])), array(6, 4), array(3, 4, 2, seed=1),
    ),
    "ragged sums": (
        lambda x, w: jax.grad(lambda w: jnp.sum(lax.ragged_dot(x, w, jnp.array([2, 1, 3])) ** 2))(w),
        array(6, 4), array(3, 4, 2, seed=1),
    ),
    "elementwise": (lambda x, y: jnp.tanh(x) * jax.nn.gelu(y) / (1 + x**2) + jnp.maximum(x, 0.0), *[array(4, 6)] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    fn, *args = PROGRAMS[name]
    assert check_rules(fn, *args)


def test_every_numeric_primitive_of_the_table_has_a_case():
    sampled = {"random_bits", "random_seed", "random_split", "random_unwrap", "random_wrap"}
    swept = {
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "sort",
        "top_k",
    }
    reduced = {"argmax", "conv_general_dilated", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod"}
    second_order = {"select_and_gather_add"}
    by_hand = {"all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "reduce_scatter"}
    by_hand |= {"debug_callback", "debug_print", "ragged_all_to_all"}  # see test_unknown_ops.py
    by_hand |= {"unreduced_reduce_scatter"}  # in the body of a shard_map: see test_shard_map.py
    sampled |= {"iota_2x32_shape", "rng_bit_generator", "rng_uniform"}
    elsewhere = {"custom_partitioning", "from_edtype", "to_edtype"}
    inner = {"cholesky_update", "geqp3", "geqrf", "ormqr"}  # of other functions: see test_harness.py
    on_gpu = {"scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"}
    on_gpu |= {"dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper"}  # see test_cudnn_attention.py
    by_hand |= {"kernel_call"}  # has its own rule: see test_with_rule.py
    traced = set().union(*(primitives(fn, *args) for fn, *args in PROGRAMS.values()))
    assert set(RULES) - traced == sampled | swept | reduced | second_order | by_hand | elsewhere | inner | on_gpu


def test_every_public_primitive_is_known_or_opaque():
    """Every primitive in `jax.lax` and `jax.extend` has a rule, a body that is inlined, or a reason in `OPAQUE`."""
    known = {*ELEMENTWISE, *MOVES, *RULES, *CALLS, *HANDLERS, "sharding_constraint"}
    found = {
        thing.name
        for module in (jex.primitives, lax, lax.linalg)
        for thing in vars(module).values()
        if isinstance(thing, jex.Primitive)
    }
    assert len(found) > 150
    assert found - known <= OPAQUE.keys()


OPAQUE = {
    "after_all": "tokens",
    "axis_index": "a scalar",
    "create_token": "tokens",
    "custom_lin": "removed by differentiation",
    "dce_sink": "no result",
    "empty2": "internal to other primitives",
    "eval_jaxpr": "removed by tracing",
    "get": "a mutable array",
    "ragged_all_to_all": "offsets determine where its rows are",
    "select_and_scatter": "superseded by select_and_scatter_add, which jax.grad uses",
    "stage": "removed by tracing",
    "swap": "a mutable array",
}


@pytest.mark.parametrize("name", ["add", "exp", "select_n", "erf", "integer_pow", "nextafter", "threefry2x32"])
def test_elementwise_primitives_are_pointwise(name):
    assert name in ELEMENTWISE
    assert str(rule_for(name, [(4, 6), (), (4, 6)], [(4, 6)], {})) == "i j, , i j -> i j"


def test_an_unlisted_primitive_has_no_rule():
    assert rule_for("mystery", [(4, 4)], [(4, 4), (4, 4)], {}) is None


def test_scales_of_a_matmul_share_a_factor_of_the_contracting_dim():
    shapes = [(2, 32, 64), (2, 16, 64), (2, 32, 2), (2, 16, 2)]
    rule = rule_for("scaled_matmul_wrapper", shapes, [(2, 32, 16)], {})
    assert str(rule) == "i j kl, i m kl, i j k, i m k -> i j m"
    assert rule.sizes[rule.operands[2][2][0]] == 2
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    dot = rule_for("scaled_dot", [(32, 64), (64, 16), (32, 2), (2, 16)], [(32, 16)], numbers)
    assert str(dot) == "i kl, kl j, i k, k j -> i j"


def test_a_rule_given_to_custom_partitioning():
    @custom_partitioning
    def matmul(x, w):
        return x @ w

    matmul.def_partition(
        partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="... i k, k j -> ... i j"
    )
    (eqn,) = jax.make_jaxpr(matmul)(jnp.ones((3, 4, 6)), jnp.ones((6, 2))).eqns
    shapes = [[v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars)]
    assert str(rule_for("custom_partitioning", *shapes, eqn.params)) == "i j k, k l -> i j l"


def _heads(num_heads, mesh, ins, outs):
    """The rule of a function: of static arguments, axis names and types, as a tuple with options."""
    assert mesh.axis_names == ("a",)
    (x, w), (y,) = ins, outs
    assert (x.shape, w.shape, y.shape) == ([3, 4, 8], [8, 6], [3, 4, 6])
    assert [str(one.element_type) for one in (x, w, y)] == ["f32", "bf16", "f32"]
    return f"... i (h{num_heads} k), (h{num_heads} k) j -> ... i j", {
        "reduction_factors": (f"h{num_heads}", "k"),
        f"h{num_heads}": num_heads,
        "k": 4,
    }


def _needs_devices(num_heads, mesh, ins, outs):
    return f"a{mesh.devices.size} -> a"


@pytest.mark.parametrize(("function", "rule"), [(_heads, "i j kl, kl m -> i j m"), (_needs_devices, "None")])
def test_a_rule_function_given_to_custom_partitioning(function, rule):
    @partial(custom_partitioning, static_argnums=(2,))
    def matmul(x, w, num_heads):
        return x @ w.astype(x.dtype)

    matmul.def_partition(
        partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule=function
    )
    args = jnp.ones((3, 4, 8)), jnp.ones((8, 6), jnp.bfloat16)
    (eqn,) = jax.make_jaxpr(lambda x, w: matmul(x, w, 2))(*args).eqns
    shapes = [[v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars)]
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("a",))):
        assert str(rule_for("custom_partitioning", *shapes, eqn.params)) == rule


GOLDEN = {
    "matmul": (lambda a, b: a @ b, (4, 6), (6, 2), "dot_general: i k, k j -> i j"),
    "batched": (lambda a, b: lax.batch_matmul(a, b), (3, 4, 6), (3, 6, 2), "dot_general: i j l, i l k -> i j k"),
    "merge": (lambda a: a.reshape(8, 3), (2, 4, 3), None, "reshape: i j k -> ij k"),
    "merge then split": (lambda a: a.reshape(8, 32), (2, 4, 32), None, "reshape: i j k -> ij k"),
    "across": (lambda a: a.reshape(2, 16), (8, 4), None, "reshape: ij k -> i jk"),
    "ones": (lambda a: a.reshape(1, 4, 1, 6), (4, 1, 6), None, "reshape: j k m -> i j l m"),
    "coprime": (lambda a: a.reshape(5, 3), (3, 5), None, "reshape: i k -> j l"),
    "row": (lambda a: a[None], (4, 6), None, "broadcast_in_dim: j k -> i j k"),
    "stretch": (lambda a: jnp.broadcast_to(a, (4, 6)), (4, 1), None, "broadcast_in_dim: i j -> i k"),
    "transpose": (lambda a: a.T, (4, 6), None, "transpose: j i -> i j"),
    "sum": (lambda a: lax.reduce_sum(a, (0,)), (4, 6), None, "reduce_sum: i j -> j"),
    "rows": (lambda t: t[jnp.array([0, 2, 2])], (4, 6), None, "gather: k j, i l -> i j"),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 0), (4, 6), (2, 6), "concatenate: i j, i j -> i j"),
    "pooling": (window(lax.max, -np.inf), (4, 6, 6), None, "reduce_window_max: i j k -> i j k"),
    "stack": (lambda a, b: jnp.stack([a, b]), (4, 6), (4, 6), "stack: j k, j k -> i j k"),
    "unstack": (lambda a: jnp.unstack(a)[0], (2, 6), None, "unstack: i j -> j, j"),
    "tile": (lambda a: jnp.tile(a, (1, 2)), (4, 6), None, "tile: i k -> i jk"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rules(name):
    fn, *shapes, want = GOLDEN[name]
    assert want in check_rules(fn, *[array(*s) for s in shapes if s is not None])


def test_kinds_of_factors():
    def kinds(name, ins, outs, **params):
        rule = rule_for(name, ins, outs, params)
        return [kind.name for kind in rule.kinds], sorted(rule.blocked)

    assert kinds("sort", [(4, 6)], [(4, 6)], dimension=1) == (["PASS", "REPLICATE"], [])
    assert kinds("sort", [(1, 6)], [(1, 6)], dimension=1) == (["PASS", "REPLICATE"], [1])
    assert kinds("sort", [(1, 4, 6)], [(1, 4, 6)], dimension=2) == (["PASS", "PASS", "REPLICATE"], [])
    assert kinds("top_k", [(4, 6)], [(4, 2), (4, 2)], k=2) == (["PASS", "REPLICATE"], [1])
    assert kinds("rev", [(4, 6)], [(4, 6)], dimensions=(0,)) == (["PERMUTE", "PASS"], [])
    assert kinds("cumsum", [(4, 6)], [(4, 6)], axis=0) == (["PERMUTE", "PASS"], [])
    assert kinds("pad", [(4, 6), ()], [(5, 6)]) == (["PERMUTE", "PASS"], [])
    assert kinds("concatenate", [(2, 6), (2, 6)], [(4, 6)], dimension=0) == (["REPLICATE", "PASS"], [])
    assert kinds("dynamic_slice", [(4, 6), (), ()], [(2, 6)]) == (["REPLICATE", "PASS"], [0])


def test_random_bits_share_the_batch_dims_of_their_keys():
    assert str(rule_for("random_bits", [(4,)], [(4, 6)], {})) == "i -> i j"
    assert str(rule_for("random_unwrap", [(4,)], [(4, 2)], {})) == "i -> i j"
    assert str(rule_for("random_wrap", [(4, 2)], [(4,)], {})) == "i j -> i"


def shapes_of(size, most_dims=3):
    """All shapes of that many elements with a few dims, none of 1."""
    if size == 1:
        yield ()
    for n in range(2, size + 1) if most_dims else ():
        if size % n == 0:
            yield from ((n, *rest) for rest in shapes_of(size // n, most_dims - 1))


@pytest.mark.parametrize("size", [24, 36, 60])
def test_factors_of_reshapes_are_the_same_part_of_both_shapes(size):
    """Factors make up each dim, and those that both arrays have are behind as many elements in each."""
    for before, after in itertools.product(shapes_of(size), repeat=2):
        rule = rule_for("reshape", [before], [after], {})
        places = []
        for shape, dims in ((before, rule.operands[0]), (after, rule.results[0])):
            assert tuple(math.prod(rule.sizes[f] for f in factors) for factors in dims) == shape, (before, after)
            order = [f for factors in dims for f in factors]
            places.append({f: math.prod(rule.sizes[g] for g in order[:k]) for k, f in enumerate(order)})
        assert all(places[0][f] == places[1][f] for f in places[0].keys() & places[1].keys()), (before, after)


def test_a_reshape_of_an_empty_array_has_no_rule():
    assert rule_for("reshape", [(0, 4)], [(4, 0)], {}) is None


@pytest.mark.parametrize("allowed, flow", [("none", None), ("forward", Flow.FORWARD), ("backward", Flow.BACKWARD)])
def test_a_barrier_lets_axes_pass_one_way_or_not_at_all(allowed, flow):
    rule = rule_table.barrier((4, 6), allowed)
    assert str(rule) == "i j -> i j" and rule.kinds == (Kind.PASS, Kind.PASS)
    assert rule.blocked == (frozenset({0, 1}) if flow is None else frozenset())
    assert flow is None or rule.flow is flow


@pytest.mark.parametrize("rows, expected", [(1, Kind.REDUCE), (2, Kind.REPLICATE), (6, Kind.PASS)])
def test_a_window_of_one_row_is_summed_over_the_shards_that_have_it(rows, expected):
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    params = {"dimension_numbers": numbers, "slice_sizes": (rows, 4)}
    rule = rule_for("gather", [(6, 4), (3, 1)], [(3, rows, 4)], params)
    (factor,) = rule.operands[0][0]
    assert rule.kinds[factor] is expected
    assert (factor in rule.blocked) == (expected is Kind.REPLICATE)
    assert (factor in rule.results[0][1]) == (rows > 1)


def test_rows_that_go_to_other_devices_share_only_their_other_dims():
    rule = rule_for("ragged_all_to_all", [(6, 4), (9, 4), (2,), (2,), (2,), (2,)], [(9, 4)], {})
    (sent,), (kept,), (got,) = rule.operands[0][0], rule.operands[1][0], rule.results[0][0]
    assert (rule.sizes[sent], rule.sizes[kept]) == (6, 9) and got == kept != sent
    assert {rule.kinds[sent], rule.kinds[kept]} == {Kind.REPLICATE} and rule.blocked >= {sent, kept}
    (features,) = {*rule.operands[0][1], *rule.operands[1][1], *rule.results[0][1]}
    assert rule.kinds[features] is Kind.PASS and rule.sizes[features] == 4
