"""Logical names in specs: resolved by the current rules, part of every cache key, shown in reasons."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from sharding import P, ShardingError, annotate, axis_rules
from sharding.annotations import axis_rules as rules_module
from sharding.spec import Dim, Spec

U = P.UNCONSTRAINED
X = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
RULES = {"batch": "data", "heads": ("tensor",), "mlp": None, "any": U}
RULES |= {"both": ("data", "tensor"), "more": ("data", ...)}


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def resolve(spec, sizes=None, ndim=2):
    return rules_module.resolve(spec, (8,) * ndim, sizes or {"data": 2, "tensor": 4}, asked="x")


@pytest.mark.parametrize(
    "spec, found",
    [
        (P("batch", "heads"), "[data, tensor]"),
        (P("heads"), "[tensor, -]"),
        (P("mlp", "any"), "[-, ?]"),
        (P("both"), "[(data,tensor), -]"),
        (P(("batch", "heads")), "[(data,tensor), -]"),
        (P(("heads", "mlp", "batch"), None), "[(tensor,data), -]"),
        (P("more"), "[(data,?), -]"),
        (P(("batch", ...), "any"), "[(data,?), ?]"),
        (P(U, ("heads", "any")), "[?, (tensor,?)]"),
        (P("data", "heads"), "[data, tensor]"),  # axes and names mixed
        (P(("data", "heads")), "[(data,tensor), -]"),
        (P(), "[-, -]"),
    ],
)
def test_names_map_to_axes(spec, found):
    with axis_rules(RULES):
        assert str(resolve(spec)) == found
    assert str(resolve(P("data"))) == "[data, -]"


def test_rules_may_be_pairs():
    with axis_rules([("batch", "data"), ("heads", "tensor")]):
        assert str(resolve(P("batch", "heads"))) == "[data, tensor]"


def test_inner_rules_extend_the_outer_ones():
    with axis_rules({"batch": "data", "heads": "tensor"}):
        with axis_rules({"heads": None, "mlp": "tensor"}) as rules:
            assert str(rules) == "batch -> data, heads -> replicated, mlp -> tensor"
            assert str(resolve(P("batch", "heads"))) == "[data, -]"
            assert str(resolve(P("heads", "mlp"))) == "[-, tensor]"
        assert str(resolve(P("batch", "heads"))) == "[data, tensor]"


def test_rules_are_reusable_and_reentrant():
    rules = axis_rules({"batch": "data"})
    for _ in range(2):
        with rules, rules:
            assert resolve(P("batch")).axes == (("data",), ())
    with pytest.raises(ShardingError, match="which is not a mesh axis"):
        resolve(P("batch"))


def test_rules_are_reset_after_an_error():
    with pytest.raises(KeyError, match="stop"), axis_rules({"batch": "data"}):
        raise KeyError("stop")
    assert not rules_module.in_force().pairs


def test_rules_are_local_to_a_thread():
    with axis_rules({"batch": "data"}), ThreadPoolExecutor(1) as thread:
        assert not thread.submit(rules_module.in_force).result().pairs


def test_an_optional_axis_may_be_absent():
    with axis_rules({"batch": ("data", "fsdp"), "embed": "fsdp"}, optional=["fsdp"]):
        assert str(resolve(P("batch"))) == "[data, -]"
        assert str(resolve(P("embed"))) == "[-, -]"
        assert str(resolve(P("batch"), {"data": 2, "fsdp": 4})) == "[(data,fsdp), -]"
        with pytest.raises(ShardingError, match="both map to 'fsdp'"):  # as on a mesh that has it
            resolve(P("batch", "embed"))


def test_a_rule_may_map_an_axis_to_itself():
    with axis_rules({"data": "data"}):
        assert str(resolve(P("data"))) == "[data, -]"


def test_names_do_not_affect_equality():
    with axis_rules({"rows": "data"}):
        spec = resolve(P("rows"))
    assert spec == Spec(dims=(Dim(axes=("data",)), Dim())) and hash(spec) == hash(resolve(P("data")))
    assert [d.via for d in spec.dims] == ["rows -> data", ""]


# Errors


@pytest.mark.parametrize(
    "spec, message",
    [
        (P("batch", "rows"), r"dim 0 'batch' \(rule batch -> data\) and dim 1 'rows' \(rule rows -> data\): both"),
        (P("data", "rows"), r"dim 0 'data' and dim 1 'rows' \(rule rows -> data\): both map to 'data'"),
        (P(("batch", "rows")), r"dim 0 'batch' .* and dim 0 'rows'"),
        (P("batch", "batch"), r"dim 0 'batch' .* and dim 1 'batch'"),
        (P("bath"), r"(?s)data=2.*batch -> data.*'bath' is neither a mesh axis .*fix: +'batch' instead of 'bath'"),
        (P("dat"), r"(?s)neither.*fix: +'data' instead of 'dat'"),
        (P("zzz"), r"(?s)neither.*fix: +a rule for 'zzz' in sharding.axis_rules"),
        (P("typo"), r"(?s)the rule typo -> tensr, but the mesh has no axis 'tensr'.*fix: +'tensor' instead"),
        (P("far"), r"(?s)no axis 'expert'.*fix: +sharding.mesh\(..., expert=1\), or optional=\('expert',\)"),
        (P("tensor"), r"'tensor' is both a mesh axis and a logical name \(tensor -> data\)"),
        (P("bath", "far", "zzz"), r"(?s)dim 0 'bath'.*dim 1 'far'.*dim 2 'zzz'"),
        (P("batch", None, None), "3 entries for 2 dims"),
    ],
)
def test_bad_name_is_an_error(spec, message):
    rules = {"batch": "data", "rows": "data", "typo": "tensr", "far": "expert", "tensor": "data"}
    with axis_rules(rules), pytest.raises(ShardingError, match=message):
        annotate(X, spec)


@pytest.mark.parametrize(
    "rules, message",
    [
        ({"batch": 3}, r"'batch': 3"),
        ({3: "data"}, r"3: 'data'"),
        ({"batch": ["data"]}, r"(?s)\['data'\].*a tuple of them"),
        ({"batch": ("data", "data")}, r"\('data', 'data'\)"),
        ({"batch": ("data", None)}, r"\('data', None\)"),
        ({"batch": ...}, "Ellipsis"),
        ([("batch", "data"), ("batch", "tensor")], r"(?s)batch -> data and batch -> tensor.*one rule per name"),
        (["batch"], "'batch'"),
        ({"a": 1, "b": 2}, r"2 failures"),
    ],
)
def test_bad_rule_is_an_error(rules, message):
    with pytest.raises(ShardingError, match=message):
        axis_rules(rules)


def test_optional_axes_are_names():
    with pytest.raises(ShardingError, match="optional"):
        axis_rules({}, optional=[3])


def test_manual_axes_cannot_be_used_inside_shard_map(mesh):
    def body(x):
        return annotate(x * 2, P("rows", "columns"))

    def f(x):
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})(x)

    with axis_rules({"rows": None, "columns": "tensor"}):
        np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)
    with axis_rules({"rows": "data", "columns": "tensor"}), pytest.raises(ShardingError, match="has no axis 'data'"):
        jax.jit(f)(X)


# Everywhere a spec is accepted


def layer(x, w):
    return annotate(jnp.tanh(x @ annotate(w, P(None, "mlp"))), P("batch", U), name="hidden")


def test_annotations_and_shardings_of_jit_take_names():
    step = sharding.jit(layer, in_shardings=(P("batch"), None), out_shardings=P("batch", "mlp"))
    with axis_rules({"batch": "data", "mlp": "tensor"}):
        c = step.complete(X, X)
        assert (c.spec("x"), c.spec("w"), c.spec("out")) == (P("data"), P(None, "tensor"), P("data", "tensor"))
        np.testing.assert_allclose(step(X, X), np.tanh(X @ X), rtol=1e-5)


def test_put_takes_names():
    with axis_rules({"batch": ("data", "tensor")}):
        assert sharding.put(X, P("batch")).sharding.spec == P(("data", "tensor"))
        with pytest.raises(ShardingError, match="neither a mesh axis"):
            sharding.put(X, P("bath"))


def test_one_error_lists_faults_of_several_arguments():
    step = sharding.jit(layer, in_shardings=(P("bath"), P("mpl")))
    with axis_rules({"batch": "data", "mlp": "tensor"}):
        with pytest.raises(ShardingError, match=r"(?s)layer: in_shardings: 2 failures.*layer\(x\).*layer\(w\)"):
            step.complete(X, X)


# Reasons


def test_reasons_show_the_name_and_its_rule():
    step = sharding.jit(layer, in_shardings=(P("batch", "embed"), None))
    with axis_rules({"batch": "data", "mlp": "tensor", "embed": None}):
        c = step.complete(X, X)
    assert str(c.why("x", dim=0)).splitlines()[-1] == "  x dim 0 <- in_shardings: batch -> data"
    assert str(c.why("x", dim=1)) == "x dim 1 is replicated: closed by in_shardings: embed -> replicated"
    lines = str(c.why("hidden", dim=1)).splitlines()
    assert lines[-1].startswith("  w dim 1 <- annotate at test_axis_rules.py:") and lines[-1].endswith(
        ": mlp -> tensor"
    )


def test_conflicts_show_the_name():
    def f(x, y):
        return annotate(x, P("rows", None)) + annotate(y, P(None, "columns"))

    with axis_rules({"rows": "data", "columns": "data"}):
        lost = sharding.jit(f).complete(X, X).conflicts
    assert any("columns -> data" in c.lost.origin for c in lost)


def test_name_survives_grad_vmap_and_scan():
    def f(x):
        g = jax.vmap(jax.grad(lambda r: (annotate(jnp.sin(r), P("columns")) ** 2).sum()))
        return jax.lax.scan(lambda c, _: (annotate(g(c), name="gradient"), None), x, None, length=2)[0]

    with axis_rules({"columns": "tensor"}):
        c = sharding.jit(f).complete(X)
    assert c.spec("gradient") == P(None, "tensor")
    assert "columns -> tensor" in str(c.why("gradient", dim=1))


# Rules in the cache key


def test_other_rules_are_a_cache_miss():
    step = sharding.jit(layer)
    for axes in ({"batch": "data", "mlp": "tensor"}, {"batch": "tensor", "mlp": "data"}):
        with axis_rules(axes):
            for _ in range(3):  # the third call takes the fast path
                out = step(X, X)
                np.testing.assert_allclose(out, np.tanh(X @ X), rtol=1e-5)
            assert out.sharding.spec == P(axes["batch"], axes["mlp"])
    with pytest.raises(ShardingError, match="'mlp', which is not a mesh axis"):
        step(X, X)


def test_other_rules_retrace_an_inner_jit():
    inner = jax.jit(layer)
    for axis in ("data", "tensor"):
        with axis_rules({"batch": axis, "mlp": None}):
            assert inner(X, X).sharding.spec == P(axis)
            assert sharding.jit(lambda x: inner(x, X)).complete(X).spec("out") == P(axis)


def test_equal_rules_are_a_cache_hit():
    calls = []

    def f(x):
        calls.append(1)
        return annotate(x * 2, P("batch"))

    step = sharding.jit(f)
    for _ in range(2):
        with axis_rules({"batch": "data"}):
            jax.block_until_ready(step(X))
    assert len(calls) == 1


def test_rules_without_a_use_are_listed():
    with axis_rules({"batch": "data", "heads": "tensor"}):
        completion = sharding.jit(lambda x: x + 1, in_shardings=P("batch")).complete(X)
    assert "axis rules that no annotation uses: heads -> tensor" in str(completion)


@pytest.mark.parametrize("strict", [False, True])
def test_rules_over_a_program_without_annotations_are_reported(strict):
    step = sharding.jit(lambda x: x + 1, strict=strict)
    with axis_rules({"batch": "data"}):
        if strict:
            with pytest.raises(ShardingError, match="nothing is annotated, also not by batch -> data"):
                step(X)
        else:
            with pytest.warns(UserWarning, match="also not by the axis rules batch -> data"):
                step(X)
