"""`Completion`: specs, tables, reasons and conflicts before anything compiles."""

import re
from inspect import currentframe

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sharding
from sharding import P, ShardingError, annotate

U = P.UNCONSTRAINED
W = np.ones((8, 8), np.float32)
DATA, TENSOR = ("data",), ("tensor",)


@pytest.fixture(scope="module", autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


def line() -> int:
    """The line number of the caller."""
    frame = currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


LINES = {}


def layer(p, x):
    LINES["hidden"] = line() + 1
    h = annotate(jnp.tanh(x @ p["w1"]), P("data", U), name="hidden")
    return h @ p["w2"]


def forward(params, x):
    for p in params["layers"]:
        x = layer(p, x)
    return {"logits": annotate(x @ params["head"], P("data", None), name="logits"), "norm": (x**2).sum()}


@pytest.fixture(scope="module")
def c(mesh):
    params = {"layers": [{"w1": W, "w2": W} for _ in range(3)], "head": W}
    specs = {"layers": [{"w1": P(None, "tensor"), "w2": None}] * 3, "head": None}
    return sharding.jit(forward, in_shardings=(specs, None)).complete(params, W)


def complete(f, *args, **options):
    return sharding.jit(f, **options).complete(*args)


def test_shardings_are_pytrees_like_arguments_and_result(c):
    w1, w2 = P(None, "tensor"), P("tensor")
    assert c.in_shardings == ({"layers": [{"w1": w1, "w2": w2}] * 3, "head": P()}, P("data"))
    assert c.out_shardings == {"logits": P("data"), "norm": P()}


def test_table_has_a_row_per_named_value_and_layers_share_one(c):
    assert c.rows() == [
        ("params/head", "8x8", "[-, -]", "-"),
        ("params/layers/*/w1 (x3)", "8x8", "[-, tensor]", "annotated"),
        ("params/layers/*/w2 (x3)", "8x8", "[tensor, -]", "dot_general"),
        ("x", "8x8", "[data, -]", "dot_general"),
        ("out/logits", "8x8", "[data, -]", "returned"),
        ("out/norm", "scalar", "[]", "-"),
        ("hidden#* (x3)", "8x8", "[data, tensor]", "annotated, tanh"),
        ("logits", "8x8", "[data, -]", "annotated"),
    ]


def test_layers_that_differ_have_separate_rows():
    specs = ([P("data"), P("tensor"), P("data")],)
    rows = complete(lambda ws: sum(w.sum() for w in ws), [W, W, W], in_shardings=specs).rows()
    assert [row[0] for row in rows[:2]] == ["ws/* (x2)", "ws/1"]


def test_prints_as_a_table(c):
    head, columns, rule, *rows = str(c).splitlines()
    assert re.fullmatch(r"forward on mesh data=2, tensor=4: \d+ values, \d+ ops", head)
    assert columns.split() == ["value", "shape", "spec", "reason"]
    assert set(rule) == {"-"}
    assert [row.split()[0] for row in rows] == [row[0].split()[0] for row in c.rows()]
    assert len({row.index("[") for row in rows}) == 1
    assert repr(c) == str(c)


def test_long_programs_are_displayed_without_costs(monkeypatch):
    c = complete(lambda x: annotate(x * 2, P("data"), name="<b>&"), W)
    page = c._repr_html_()
    assert "&quot;with_costs&quot;:true" in page and "<b>" not in page
    monkeypatch.setattr("sharding.completion.MAX_DISPLAYED_OPS", 1)
    assert "&quot;with_costs&quot;:false" in c._repr_html_()


@pytest.mark.parametrize(
    "name, spec",
    [
        ("params/layers/0/w1", P(None, "tensor")),
        ("layers/2/w2", P("tensor")),
        ("w2", P("tensor")),  # three that are sharded identically
        ("head", P()),
        ("x", P("data")),
        ("hidden#1", P("data", "tensor")),
        ("hidden", P("data", "tensor")),
        ("out/logits", P("data")),
        ("norm", P()),
    ],
)
def test_spec_by_path_end_of_path_or_name(c, name, spec):
    assert c.spec(name) == spec


def test_ambiguous_end_of_a_path_is_an_error_that_lists_the_values():
    c = complete(
        lambda p: p["a"]["w"] + p["b"]["w"],
        {k: {"w": W} for k in "ab"},
        in_shardings=({"a": P("data"), "b": P("tensor")},),
    )
    with pytest.raises(
        ShardingError, match=r"(?s)'w'.*sharded differently.*p/a/w: \[data, -\].*p/b/w: \[tensor, -\].*fix"
    ):
        c.spec("w")


@pytest.mark.parametrize(
    "name, near", [("hiden", "hidden#"), ("params/layers/0/w3", "params/layers/0/w"), ("hed", "params/head")]
)
def test_unknown_name_is_an_error_with_the_nearest(c, name, near):
    for lookup in (c.spec, c.why):
        with pytest.raises(ShardingError, match=f"(?s)the value '{name}'.*fix: .*{re.escape(near)}"):
            lookup(name)


def test_annotation_does_not_shadow_the_name_of_an_argument():
    c = complete(lambda w: annotate(w.T, P(None, "data"), name="w"), W)
    assert c.spec("w") == P("data")
    assert c.spec("w#0") == P(None, "data")


def test_name_inside_a_loop_is_one_value():
    c = complete(
        lambda x: jax.lax.scan(lambda h, _: (annotate(h * 2, P("data"), name="h"), None), x, None, length=3)[0], W
    )
    assert c.spec("h") == P("data")
    assert "h#0" not in str(c)


def test_why_ends_at_the_annotation_and_names_the_users_line(c):
    steps = list(c.why("x", dim=0))
    assert steps[0] == "x dim 0 is sharded over data:"
    assert steps[1].startswith("  x dim 0 <- dot_general at test_completion.py:")
    assert steps[-1] == f"  hidden#0 dim 0 <- annotate at test_completion.py:{LINES['hidden']} (layer)"


def test_why_ends_at_in_shardings(c):
    assert list(c.why("layers/1/w2", dim=0))[-1] == "  params/layers/1/w1 dim 1 <- in_shardings"
    assert list(c.why("layers/1/w1", dim=1)) == [
        "layers/1/w1 dim 1 is sharded over tensor:",
        "  params/layers/1/w1 dim 1 <- in_shardings",
    ]


def test_why_ends_at_the_sharding_of_an_argument_or_a_constraint(mesh):
    placed = jax.device_put(W, NamedSharding(mesh, P("data")))
    assert list(complete(lambda x: x * 2, placed).why("out", 0))[-1] == "  x dim 0 <- the argument's sharding"
    c = complete(lambda x: jax.lax.with_sharding_constraint(x * 2, P("data")), W)
    assert re.search(r"<- with_sharding_constraint at test_completion.py:\d+", str(c.why("x", 0)))
    c = complete(lambda x: x * 2, W, out_shardings=P("data"))
    assert str(c.why("x", 0)).endswith("<- out_shardings")


def test_why_covers_all_dims_and_axes():
    c = complete(lambda x: x * 2, W, in_shardings=P(("data", "tensor"), None))
    assert list(c.why("x")) == [
        "x dim 0 is sharded over data:",
        "  x dim 0 <- in_shardings",
        "x dim 0 is sharded over tensor:",
        "  x dim 0 <- in_shardings",
        "x dim 1 is replicated: closed by in_shardings",
    ]
    assert str(c.why("x", dim=-1)) == "x dim 1 is replicated: closed by in_shardings"


def test_why_of_a_replicated_dim():
    c = complete(lambda a, b: (a @ b, b.sum()), W, W, in_shardings=(P("data", U), P(U, "data")))
    assert str(c.why("a", 1)) == "a dim 1 is replicated: not reached by any annotation"
    assert str(c.why("out/0", 1)).startswith(
        "out/0 dim 1 is replicated: b dim 1: (data) from in_shardings was rejected: the axis already"
    )
    assert str(c.why("out/1")) == "out/1 is a scalar"


def test_why_of_a_dim_out_of_range(c):
    for dim in (2, -3):
        with pytest.raises(ShardingError, match=rf"(?s)why\('x', dim={dim}\).*2 dims: \(8, 8\).*0 <= dim < 2"):
            c.why("x", dim=dim)


def test_one_more_annotation_gives_another_completion(c):
    more = c.annotate("head", P(None, "tensor"))
    assert (c.spec("head"), c.spec("x")) == (P(), P("data"))
    assert (more.spec("head"), more.spec("x")) == (P(None, "tensor"), P("data"))
    assert str(more.why("head", dim=1)).endswith(f"<- annotate('params/head', {P(None, 'tensor')})")
    assert more.in_shardings[0]["head"] == P(None, "tensor")


def test_one_more_annotation_on_all_values_of_a_name(c):
    more = c.annotate("w2", P(U, "data"), priority=1)
    assert {more.spec(f"layers/{i}/w2") for i in range(3)} == {P("tensor", "data")}


def test_one_more_identical_annotation_changes_nothing(c):
    more = c.annotate("layers/0/w1", P(None, "tensor"))
    assert more.assignment.specs == c.assignment.specs
    assert more.assignment.graph.annotations == c.assignment.graph.annotations


def test_one_more_conflicting_annotation_is_an_error(c):
    with pytest.raises(ShardingError, match=r"(?s)layers/0/w1.*None, 'tensor'\) from in_shardings.*layers/1/w1"):
        c.annotate("w1", P("tensor", None))
    with pytest.raises(ShardingError, match=r"(?s)'nobody', which is not a mesh axis"):
        c.annotate("head", P("nobody"))
    with pytest.raises(ShardingError, match=r"(?s)dim 0 of size 6 over tensor=4"):
        complete(lambda x: x, np.ones(6)).annotate("x", P("tensor"))
    with pytest.raises(ShardingError, match=r"(?s)'params/heat'.*params/head"):
        c.annotate("params/heat", P())


def test_one_more_annotation_under_axis_rules(c):
    with sharding.axis_rules({"mlp": "tensor"}):
        assert c.annotate("head", P(None, "mlp")).spec("head") == P(None, "tensor")


def test_one_more_annotation_with_engine_xla():
    bare = complete(lambda x: x * 2, W, engine="xla").annotate("x", P("data"))
    assert (bare.spec("x"), bare.spec("out")) == (P("data"), P())


def test_one_more_annotation_with_engine_shardy():
    more = complete(lambda x: x * 2, W, engine="shardy").annotate("x", P("data"))
    assert (more.spec("x"), more.spec("out")) == (P("data"), P("data"))


def test_conflict_has_both_claims_the_rule_and_the_bytes():
    at = line() + 1
    c = complete(lambda a, b: a @ b, W, W, in_shardings=(P("data", None), P(None, "data")))
    (conflict,) = c.conflicts
    assert conflict.op == "dot_general"
    assert conflict.source.startswith(f"test_completion.py:{at} ")
    assert (conflict.kept.dim, conflict.kept.axes, conflict.kept.origin) == (0, DATA, "in_shardings")
    assert (conflict.lost.value, conflict.lost.dim, conflict.lost.axes) == (c.value("b"), 1, DATA)
    assert conflict.rule == "the axis already shards another dim"
    assert conflict.bytes_lost == 8 * 8 * 4 // 2 - 8 * 8 * 4 // 4  # a half of the result instead of a quarter
    assert str(conflict.lost) == "b dim 1: (data) from in_shardings"
    assert "rejected b dim 1: (data) from in_shardings: the axis already shards another dim (64 bytes)" in str(conflict)
    assert "1 conflicts, 64 bytes per device more than requested" in str(c)


def test_two_annotations_of_one_value_are_a_conflict():
    c = complete(lambda x: annotate(annotate(x * 2, P("data", U)), P("tensor", U)), W)
    (conflict,) = c.conflicts
    assert (conflict.kept.axes, conflict.lost.axes) == (DATA, TENSOR)
    assert "annotate at test_completion.py" in conflict.kept.origin
    assert "annotate at test_completion.py" in conflict.lost.origin
    assert c.spec("out") == P("tensor")


def test_program_without_conflicts(c):
    assert c.conflicts == ()
    assert c.uneven == ()
    assert c.unknown == ()


def test_ops_without_a_rule_are_named():
    c = complete(lambda x: jax.pure_callback(np.sin, x, annotate(x, P("data"))), W)
    (unknown,) = c.unknown
    assert (unknown.op, unknown.num_bytes, unknown.count) == ("pure_callback", W.size * W.dtype.itemsize, 1)
    assert unknown.source.startswith("test_completion.py") and unknown.is_predicted
    assert "no rule for pure_callback (x1)" in str(c)


def test_uneven_shardings_are_listed_and_limited_at_arguments():
    odd = np.ones((3, 6), np.float32)
    c = complete(lambda x: annotate(jnp.pad(x, ((0, 1), (0, 2))), P("data", "tensor"), name="padded"), odd)
    assert (c.spec("x"), c.spec("padded")) == (P(), P("data", "tensor"))
    assert [text.split(":")[0] for text in c.uneven] == ["x", "x"]
    assert "uneven: x: dim 1 of size 6 over tensor=4 = 4: 6 = 1 x 4 + 2" in str(c)


def test_outputs_that_reuse_donated_shardings_are_counted_and_not_repeated():
    c = complete(lambda s, x: ({"w": s["w"] + x}, x.sum()), {"w": W}, W, donate_argnums=0)
    assert "1 outputs reuse donated" in str(c)
    assert "1 outputs reuse donated inputs' shardings" in str(c)
    assert [row[0] for row in c.rows()] == ["s/w", "x", "out/1"]


def test_bytes_of_a_value_per_device(c):
    v = c.value("hidden#0")
    assert c.num_bytes(v, c.assignment.specs[v]) == 8 * 8 * 4 // 8


def test_described_devices_are_enough():
    with sharding.mesh(data=16, tensor=16, devices="v5p:4x8x8"):
        shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        c = complete(lambda w, x: jnp.tanh(x @ w), shape, shape, in_shardings=(P(None, "tensor"), P("data")))
    assert c.spec("out") == P("data", "tensor")
