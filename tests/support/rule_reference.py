"""Numerical reference for sharding rules: a rule is correct iff sharding by it gives the right result.

- pass-through: the primitive applied to operand shards gives the result shards, and shard k of a result depends on no
  other shard of the operands;
- reduction: combining over k the results of operands that are neutral outside shard k gives the unsharded result;
- sizes: a dim is the product of its factors, except in ops that resize it;
- nothing is missed: dims of one size that share no factor depend on each other's other shards, and so do those whose
  factor must be replicated or exchanges halos.

Programs are traced, and each equation is checked on its actual operands.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

from sharding import compat
from sharding.graph import CALLS
from sharding.rules import Kind, rule_for


def check_rules(fn, *args):
    """Runs `fn` equation by equation, checks each equation's rule, and returns the rules as text."""
    closed = jax.make_jaxpr(fn)(*args)
    texts: list[str] = []
    _check_jaxpr(compat.open_jaxpr(closed), closed.consts, jax.tree.leaves(args), texts)
    return texts


def primitives(fn, *args):
    """Names of all primitives that a function traces to, including those inside calls."""

    def names(jaxpr):
        for eqn in compat.open_jaxpr(jaxpr).eqns:
            inner = [j for _, _, j in compat.sub_jaxprs(eqn.params)] if eqn.primitive.name in CALLS else []
            yield from (name for j in inner for name in names(j))
            yield eqn.primitive.name

    return set(names(jax.make_jaxpr(fn)(*args)))


def _check_jaxpr(jaxpr, consts, args, texts):
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [a.val if compat.is_literal(a) else env[a] for a in eqn.invars]
        if eqn.primitive.name in CALLS:
            inner = next(j for _, _, j in compat.sub_jaxprs(eqn.params))
            outs = _check_jaxpr(compat.open_jaxpr(inner), getattr(inner, "consts", ()), ins, texts)
        else:
            outs = _run(eqn, ins, {})
            _check_rule(eqn, ins, outs, texts)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [a.val if compat.is_literal(a) else env[a] for a in jaxpr.outvars]


def _run(eqn, ins, changed):
    params = {**eqn.params, **changed}
    outs = eqn.primitive.bind(*map(jnp.asarray, ins), **eqn.primitive.get_bind_params(params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _check_rule(eqn, ins, outs, texts):
    name = eqn.primitive.name
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in (*map(jnp.asarray, ins), *outs)):
        return
    rule = rule_for(name, [np.shape(x) for x in ins], [x.shape for x in outs], eqn.params)
    assert rule is not None, name
    texts.append(f"{name}: {rule}")
    for x, dims in zip((*ins, *outs), (*rule.operands, *rule.results), strict=True):
        assert len(dims) == np.ndim(x), (name, rule)
    ins = [np.asarray(x) for x in ins]
    _check_sizes(name, rule, ins, outs)
    _check_nothing_is_missed(eqn, ins, outs, rule)
    for f, (size, kind) in enumerate(zip(rule.sizes, rule.kinds, strict=True)):
        in_result = any(_find_factor(dims, f) is not None for dims in rule.results)
        assert not (kind is Kind.REDUCE and in_result), (name, rule, rule.kinds)
        if name in COMBINE and size > 1:  # what is summed up says so
            assert in_result or kind is not Kind.PASS, (name, rule, rule.kinds)
        holders = [i for i, dims in enumerate(rule.operands) if _find_factor(dims, f) is not None]
        if size == 1 or not holders:
            continue
        if kind is Kind.PASS and in_result:
            _check_locality(eqn, ins, outs, rule, f)
            if name not in SHIFTED:
                _check_shards(eqn, ins, outs, rule, f)
        if kind is Kind.REDUCE and name in COMBINE:
            _check_reduction(eqn, ins, outs, rule, f)


def _check_sizes(name, rule, ins, outs):
    for x, dims in zip((*ins, *outs), (*rule.operands, *rule.results), strict=True):
        for size, factors in zip(np.shape(x), dims, strict=True):
            product = math.prod(rule.sizes[f] for f in factors)
            assert name in RESIZED or product == size, (name, rule, rule.sizes)
            assert name != "conv_general_dilated" or product <= size, (name, rule, rule.sizes)


def _check_nothing_is_missed(eqn, ins, outs, rule):
    """Checks that dims which correspond have a common factor, which passes through."""
    if eqn.primitive.name in MISSED:
        return
    for (t, x), (u, y) in itertools.product(enumerate(ins), enumerate(outs)):
        for d, e in itertools.product(range(x.ndim), range(y.ndim)):
            common = set(rule.operands[t][d]) & set(rule.results[u][e])
            passes = any(rule.kinds[f] is Kind.PASS and f not in rule.blocked for f in common)
            if x.shape[d] == y.shape[e] > 1 and not passes:
                assert not _correspond(eqn, ins, outs, (t, d), (u, e)), f"{eqn}\n{rule} misses {d} of {t} in {e} of {u}"


def _correspond(eqn, ins, outs, operand, result):
    """Whether shards of a result along a dim depend on the shards of an operand along a dim alone, and do so."""
    (t, d), (u, e) = operand, result
    n, rng = _num_shards(ins[t].shape[d]), np.random.default_rng(2)
    changes = np.zeros((n, n), bool)
    for j in range(n):
        for _ in range(2):  # one change may go unnoticed
            changed = np.array(ins[t])
            part = np.split(np.moveaxis(changed, d, 0), n)[j]
            part[...] = _changed(part, rng)
            other = np.asarray(_run(eqn, [changed if k == t else x for k, x in enumerate(ins)], {})[u])
            pairs = (np.split(np.moveaxis(np.asarray(z), e, 0), n) for z in (other, outs[u]))
            changes[j] |= [not np.array_equal(a, b) for a, b in zip(*pairs, strict=True)]
    return bool(changes.diagonal().all() and not changes[~np.eye(n, dtype=bool)].any())


def _changed(x, rng):
    """Other numbers of the same kind; integers in another order, so that indices stay valid."""
    if x.dtype == bool:
        return ~x
    if x.dtype.kind in "iu":
        return rng.permutation(x.reshape(-1)).reshape(x.shape)
    return 1 - x + rng.integers(0, 2, x.shape).astype(x.dtype)


def _find_factor(dims, f):
    return next(((d, list(factors).index(f)) for d, factors in enumerate(dims) if f in factors), None)


def _unfold(x, dims, rule, f):
    """`x` with the dim of factor f unfolded into its factors, the axis of f, and the dim; None without an exact dim."""
    at = _find_factor(dims, f)
    if at is None:
        return None
    d, k = at
    unfolded = [rule.sizes[g] for g in dims[d]]
    if math.prod(unfolded) != x.shape[d]:
        return None  # an approximate factor: the input's spatial dims of a convolution
    return x.reshape(*x.shape[:d], *unfolded, *x.shape[d + 1 :]), d + k, d


def _num_shards(size):
    return next(n for n in range(2, size + 1) if size % n == 0)


def _shard(x, dims, rule, f, k, n):
    """Shard k of n of an array along factor f; the array itself if it lacks the factor."""
    view = _unfold(x, dims, rule, f)
    if view is None:
        return x
    unfolded, axis, d = view
    part = np.split(np.asarray(unfolded), n, axis=axis)[k]
    return part.reshape(*x.shape[:d], x.shape[d] // n, *x.shape[d + 1 :])


def _only_shard(x, dims, rule, f, k, n, other):
    """The array with `other` in place of everything outside shard k."""
    view = _unfold(x, dims, rule, f)
    if view is None:
        return x
    unfolded, axis, _ = view
    inside = np.arange(unfolded.shape[axis]) // (unfolded.shape[axis] // n) == k
    mask = inside.reshape([-1 if i == axis else 1 for i in range(unfolded.ndim)])
    return np.where(np.broadcast_to(mask, unfolded.shape).reshape(x.shape), x, other)


def _check_shards(eqn, ins, outs, rule, f):
    n = _num_shards(rule.sizes[f])
    for k in range(n):
        local = [_shard(x, dims, rule, f, k, n) for x, dims in zip(ins, rule.operands, strict=True)]
        expected = [_shard(x, dims, rule, f, k, n) for x, dims in zip(outs, rule.results, strict=True)]
        shapes = [x.shape for x in local], [x.shape for x in ins], expected[0].shape
        change = LOCAL.get(eqn.primitive.name, lambda *_: {})(eqn.params, *shapes)
        for got, shard in zip(_run(eqn, local, change), expected, strict=True):
            np.testing.assert_allclose(got, shard, rtol=1e-5, atol=1e-6, err_msg=f"{eqn}\n{rule} factor {f} shard {k}")


def _check_locality(eqn, ins, outs, rule, f):
    n, rng = _num_shards(rule.sizes[f]), np.random.default_rng(1)
    for k in range(n):
        noise = [rng.integers(0, 2, x.shape).astype(x.dtype) for x in ins]
        pairs = zip(ins, rule.operands, noise, strict=True)
        other = _run(eqn, [_only_shard(x, dims, rule, f, k, n, z) for x, dims, z in pairs], {})
        for got, x, dims in zip(other, outs, rule.results, strict=True):
            np.testing.assert_allclose(
                _shard(np.asarray(got), dims, rule, f, k, n), _shard(np.asarray(x), dims, rule, f, k, n), rtol=1e-5,
                err_msg=f"{eqn}\n{rule}: shard {k} of factor {f} depends on other shards",
            )  # fmt: skip


def _check_reduction(eqn, ins, outs, rule, f):
    neutral, combine = COMBINE[eqn.primitive.name]
    n, is_scatter = _num_shards(rule.sizes[f]), eqn.primitive.name.startswith("scatter")
    if eqn.primitive.name == "conv_general_dilated" and _unfold(ins[1], rule.operands[1], rule, f) is None:
        return  # an approximate factor, see `_unfold`
    partial = []
    for k in range(n):
        zero = [np.full_like(x, neutral(x.dtype)) for x in ins]
        local = [_only_shard(x, dims, rule, f, k, n, z) for x, dims, z in zip(ins, rule.operands, zero, strict=True)]
        if is_scatter:  # the operand is added to once; indices are the same on all shards
            local = [local[0] if k == 0 else zero[0], ins[1], local[2]]
        elif eqn.primitive.name == "gather":
            local[1] = ins[1]
        elif eqn.primitive.name == "conv_general_dilated":  # linear in the kernel; windows overlap in the input
            local[0] = ins[0]
        partial.append(_run(eqn, local, {})[0])
    np.testing.assert_allclose(combine(eqn, ins, partial), outs[0], rtol=1e-5, atol=1e-6, err_msg=f"{eqn}\n{rule} {f}")


def _extreme(low):
    def neutral(dtype):
        info = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
        return info.min if low else info.max

    return neutral


def _reduce(op):
    return lambda eqn, ins, partial: functools.reduce(op, map(np.asarray, partial))


def _arg(best):
    def combine(eqn, ins, partial):
        (axis,) = eqn.params["axes"]
        stacked = np.stack([np.asarray(p) for p in partial])
        values = np.stack([np.take_along_axis(ins[0], np.expand_dims(i, axis), axis).squeeze(axis) for i in stacked])
        return np.take_along_axis(stacked, best(values, axis=0)[None], 0)[0]

    return combine


COMBINE = {
    "dot_general": (lambda _: 0, _reduce(np.add)),
    "conv_general_dilated": (lambda _: 0, _reduce(np.add)),
    "gather": (lambda _: 0, _reduce(np.add)),
    "scatter-add": (lambda _: 0, _reduce(np.add)),
    "scatter-mul": (lambda _: 1, _reduce(np.multiply)),
    "scatter-max": (_extreme(low=True), _reduce(np.maximum)),
    "scatter-min": (_extreme(low=False), _reduce(np.minimum)),
    "reduce_sum": (lambda _: 0, _reduce(np.add)),
    "reduce_prod": (lambda _: 1, _reduce(np.multiply)),
    "reduce_max": (_extreme(low=True), _reduce(np.maximum)),
    "reduce_min": (_extreme(low=False), _reduce(np.minimum)),
    "reduce_and": (lambda _: True, _reduce(np.logical_and)),
    "reduce_or": (lambda _: False, _reduce(np.logical_or)),
    "reduce_xor": (lambda _: 0, _reduce(np.bitwise_xor)),
    "argmax": (_extreme(low=True), _arg(np.argmax)),
    "argmin": (_extreme(low=False), _arg(np.argmin)),
}
"""Primitive -> neutral element of its reduction, and how partial results combine."""

RESIZED = {"approx_top_k", "concatenate", "conv_general_dilated", "dynamic_slice", "gather", "pad", "reduce_window"}
RESIZED |= {"reduce_window_max", "reduce_window_min", "reduce_window_sum", "slice", "split", "top_k"}
"""Primitives whose results have a part of a factor, or more than it."""

MISSED = {"select_and_scatter_add", "triangular_solve", "tridiagonal_solve"}
"""Primitives with dims that correspond but are replicated: XLA shards only the batch dims of its solvers, and a window
may only happen not to overlap the next."""

SHIFTED = {"dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min", "scatter-sub"}
SHIFTED |= {"ragged_dot_general"}
"""Primitives with data-dependent shard offsets: only locality is checked."""


def _groups(params, ins, unsharded, out):
    numbers = params["dimension_numbers"]
    features = numbers.rhs_spec[0]
    fewer_filters = ins[1][features] < unsharded[1][features]
    changed = {}
    for key, dim in (("batch_group_count", numbers.lhs_spec[0]), ("feature_group_count", numbers.lhs_spec[1])):
        if params[key] > 1 and fewer_filters and ins[0][dim] < unsharded[0][dim]:
            changed[key] = params[key] * ins[0][dim] // unsharded[0][dim]
    return changed


LOCAL = {
    "reshape": lambda p, ins, unsharded, out: {"new_sizes": out},
    "broadcast_in_dim": lambda p, ins, unsharded, out: {"shape": out},
    "slice": lambda p, ins, unsharded, out: {"limit_indices": tuple(map(min, p["limit_indices"], ins[0]))},
    "gather": lambda p, ins, unsharded, out: {"slice_sizes": tuple(map(min, p["slice_sizes"], ins[0]))},
    "dynamic_slice": lambda p, ins, unsharded, out: {"slice_sizes": out},
    "conv_general_dilated": _groups,
}
"""Primitive -> its shape parameters for one shard."""
