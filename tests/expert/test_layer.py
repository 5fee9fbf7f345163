"""The MoE layer equals its experts token by token on every mesh, with 2 all-to-alls forward and 2 backward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.expert_reference import (
    BATCH,
    EXPERTS,
    FEATURES,
    LENGTH,
    call,
    layer,
    route,
    token_by_token,
    tokens,
    value_and_grad,
    within_capacity,
)

import sharding
from sharding import P, ShardingError, expert
from sharding.cost import read_compiled
from sharding.expert import capacity

KEY = jax.random.key(2)
OPTIONS = {
    "gshard": {"capacity_factor": 1.0},
    "infinite capacity": {"capacity_factor": math.inf},
    "dropless": {"capacity_factor": None},
    "switch": {"top_k": 1, "capacity_factor": 0.5},
    "three": {"top_k": 3},
    "three, dropless": {"top_k": 3, "capacity_factor": None},
    "groups": {"groups": 16, "capacity_factor": 1.0},
}
QUICK = [
    name if name in ("gshard", "three, dropless") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS
]
MESHES = [{"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}]


def moe_capacity(moe, length):
    factor = math.inf if moe.capacity_factor is None else moe.capacity_factor
    return capacity.expert_capacity(factor, tokens=length, top_k=moe.top_k, num_experts=EXPERTS)


@functools.cache
def single_device(name):
    return jax.device_get(jax.jit(value_and_grad)(layer(**OPTIONS[name]), tokens(), KEY))


@pytest.mark.parametrize("name", QUICK)
def test_equals_the_experts_token_by_token(name):
    moe, x = layer(**OPTIONS[name]), tokens()
    x_GSM = x.reshape(moe.groups or BATCH, -1, FEATURES)
    routing, slots = route(moe, x_GSM, KEY), moe_capacity(moe, x_GSM.shape[1])
    (_, (y, balance)), _ = single_device(name)
    np.testing.assert_allclose(y.reshape(x_GSM.shape), token_by_token(moe, x_GSM, routing, slots), atol=1e-5)
    found = within_capacity(routing, slots)
    assert balance.dropped == np.sum(np.asarray(routing.wanted_GSK) & ~found)
    assert (balance.dropped > 0) == (moe.capacity_factor in (1.0, 0.5, 1.25))
    chosen = np.asarray(routing.experts_GSK)[np.asarray(routing.wanted_GSK)]
    np.testing.assert_array_equal(balance.load, np.bincount(chosen, minlength=EXPERTS))
    assert balance.auxiliary_loss == pytest.approx(float(routing.auxiliary_loss), rel=1e-5)


def test_infinite_capacity_equals_the_dense_top_2_sum():
    moe, x = layer(capacity_factor=math.inf), tokens()
    gates = jax.nn.softmax(x @ moe.router.gate[...])
    every = jnp.einsum("bsfe,efm->bsem", jax.nn.gelu(jnp.einsum("bsm,emf->bsfe", x, moe.up[...])), moe.down[...])
    best = jnp.where(gates >= jnp.sort(gates, -1)[..., -2:-1], gates, 0)
    expected = jnp.einsum("bse,bsem->bsm", best / best.sum(-1, keepdims=True), every)
    for other in (moe, layer(capacity_factor=None)):
        np.testing.assert_allclose(call(other, x)[0], expected, atol=1e-5)


def on_mesh(name, sizes):
    """The result on a mesh, and facts of the compiled program."""
    moe, x = layer(**OPTIONS[name]), tokens()
    with sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]) as mesh:
        batch = tuple(axis for axis in sizes if axis not in ("tensor", "seq"))
        step = sharding.jit(value_and_grad, in_shardings=(None, P(batch, "seq" if "seq" in sizes else None), None))
        compiled = step.lower(moe, x, KEY).compile()
        return jax.device_get(compiled(moe, x, KEY)), read_compiled(compiled, mesh=mesh)


def check(found, expected):
    def same(a, b):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7

    (value, (y, balance)), gradients = found
    (value1, (y1, balance1)), gradients1 = expected
    assert value == pytest.approx(float(value1), rel=1e-5)
    np.testing.assert_allclose(y, y1, atol=1e-5)
    np.testing.assert_array_equal(balance.dropped, balance1.dropped)
    np.testing.assert_array_equal(balance.load, balance1.load)
    np.testing.assert_array_equal((y == 0).all(-1), (y1 == 0).all(-1))  # the same tokens are dropped
    jax.tree.map(same, gradients, gradients1)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gshard", MESHES[1]), ("dropless", MESHES[2]), ("dropless", {"data": 2, "expert": 2, "seq": 2})],
    ids=lambda value: str(value),
)
def test_a_mesh_changes_no_result_and_has_four_all_to_alls(name, sizes):
    found, facts = on_mesh(name, sizes)
    check(found, single_device(name))
    exchanges = {axes: number for (kind, axes), (number, _) in facts.by_axes().items() if kind == "all-to-all"}
    assert exchanges == {("expert",): 4}
    if name == "gshard":
        assert facts.by_kind().keys() == {"all-to-all", "all-reduce"}


@pytest.mark.parametrize("factor", [1.0, 4 / 3, pytest.param(None, marks=pytest.mark.slow)])
def test_sharded_sequences_change_no_result(factor):
    """Routing sees whole groups; the axis shards the slots of an expert, too, where it divides them: 4, not 3."""
    moe, x, sizes = layer(capacity_factor=factor), tokens(), {"data": 2, "expert": 2, "seq": 2}
    with sharding.mesh(sizes):
        step = sharding.jit(value_and_grad, in_shardings=(None, P(("data", "expert"), "seq"), None))
        found = jax.device_get(step(moe, x, KEY))
        text = str(step.complete(moe, x, KEY).explicit()) if factor else ""
    check(found, jax.device_get(jax.jit(value_and_grad)(moe, x, KEY)))
    assert ("'seq'" in text) == (factor is not None)


@pytest.mark.parametrize("batch, length", [(2, 12), (4, 9), (1, 8)])
def test_dropless_tokens_of_sequences_that_the_axes_do_not_divide(batch, length):
    moe, x = layer(**OPTIONS["dropless"]), tokens()[:batch, :length]
    with sharding.mesh(data=2, expert=2, seq=2):
        found, balance = sharding.jit(lambda moe, x: moe(x, KEY))(moe, x)
    expected, alone = jax.jit(lambda moe, x: moe(x, KEY))(moe, x)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(balance.load, alone.load)


def test_dropless_tokens_that_the_expert_axis_does_not_divide():
    moe, x = layer(**OPTIONS["dropless"]), tokens()[:1, :9]
    with sharding.mesh(data=2, expert=4), pytest.raises(ShardingError, match=r"(?s)1 x 9 tokens.*math\.inf"):
        sharding.jit(lambda moe, x: moe(x)[0]).complete(moe, x)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_mesh_changes_the_result(name, sizes):
    found, facts = on_mesh(name, sizes)
    check(found, single_device(name))
    assert facts.by_kind()["all-to-all"][0] == 4


@pytest.mark.parametrize("sizes", [pytest.param(MESHES[0], marks=pytest.mark.slow), MESHES[2]], ids=str)
def test_kernels_change_no_result(sizes):
    """Grouped matmuls as kernels on the shards of manual code, some of whose operands differ along fewer axes."""
    moe = layer(**OPTIONS["dropless"], implementation="megablox")
    with sharding.mesh(sizes):
        axes = tuple(axis for axis in ("data", "expert") if axis in sizes)
        step = sharding.jit(value_and_grad, in_shardings=(None, P(axes), None))
        completion = step.complete(moe, tokens(), KEY)
        compiled = read_compiled(step.lower(moe, tokens(), KEY).compile())
        found = jax.device_get(step(moe, tokens(), KEY))
    expected = single_device("dropless")
    check(jax.tree.unflatten(jax.tree.structure(expected), jax.tree.leaves(found)), expected)
    assert completion.communication().lowered("cpu").by_kind() == compiled.by_kind()
    assert not completion.unknown
    assert "kernel_call" in str(jax.make_jaxpr(lambda moe, x: moe(x)[0])(moe, tokens()))


@pytest.mark.parametrize("factor", [1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_two_all_to_alls_forward(factor):
    moe, x = layer(capacity_factor=factor), tokens()
    with sharding.mesh(data=2, expert=4):
        forward = sharding.jit(lambda moe, x: moe(x)[0], in_shardings=(None, P(("data", "expert"))))
        found = read_compiled(forward.lower(moe, x).compile()).by_kind()
        assert forward.complete(moe, x).communication().by_kind() == found
    assert found["all-to-all"][0] == 2


@pytest.mark.slow
def test_plain_jit_has_four_all_to_alls():
    moe, x = layer(), tokens()
    with sharding.mesh(data=2, expert=4):
        placed = sharding.put(x, P(("data", "expert")))
        compiled = jax.jit(value_and_grad).lower(moe, placed, KEY).compile()
        assert read_compiled(compiled).by_kind()["all-to-all"][0] == 4
        check(
            jax.device_get(jax.jit(value_and_grad)(moe, placed, KEY)),
            jax.device_get(jax.jit(value_and_grad)(moe, x, KEY)),
        )


@pytest.mark.slow
def test_a_mesh_of_one():
    moe, x = layer(), tokens()
    with sharding.mesh(expert=1, devices=jax.devices()[:1]):
        found = jax.device_get(sharding.jit(value_and_grad)(moe, x, KEY))
    check(found, jax.device_get(jax.jit(value_and_grad)(moe, x, KEY)))


def test_gradients_reach_the_router_and_all_used_experts():
    moe, x = layer(capacity_factor=None), tokens()[:1, :3]
    (_, (_, balance)), (gradients, _) = jax.jit(value_and_grad)(moe, x, KEY)
    used = np.asarray(balance.load) > 0
    assert 0 < used.sum() < EXPERTS
    for leaf in (gradients.up, gradients.down):
        np.testing.assert_array_equal(np.any(leaf[...] != 0, axis=(1, 2)), used)
    without = jax.jit(jax.grad(lambda moe: moe(x, KEY)[0].sum()))(moe)  # without the auxiliary loss too
    assert np.any(without.router.gate[...]) and np.any(gradients.router.gate[...])


@pytest.mark.parametrize("factor", [1.0, None])
def test_program_size_does_not_depend_on_the_number_of_devices(factor):
    moe = jax.eval_shape(lambda: layer(num_experts=64, top_k=2, capacity_factor=factor))
    x = jax.ShapeDtypeStruct((128, LENGTH, FEATURES), jnp.float32)
    lengths = set()
    for data, experts in [(2, 4), (4, 32)]:
        with sharding.mesh(data=data, expert=experts, devices=data * experts):
            step = sharding.jit(value_and_grad, in_shardings=(None, P(("data", "expert")), None))
            lengths.add(len(step.lower(moe, x, KEY).as_text().splitlines()))
    assert len(lengths) == 1


def test_bfloat16():
    moe, x = layer(), tokens().astype(jnp.bfloat16)
    y, balance = call(moe, x)
    assert y.dtype == jnp.bfloat16 and balance.auxiliary_loss.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), call(moe, x.astype(jnp.float32))[0], atol=0.05)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity_factor": 0}, r"(?s)capacity_factor=0\).*a positive capacity factor.*1.25"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
        ({"top_k": 9}, r"(?s)top_k=9.*num_experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"router": "gshrad"}, r"(?s)router='gshrad'.*fix: *router='gshard'"),
        ({"router": "switch"}, r"Switch\(top_k=2\)"),
        ({"hidden": 0, "features": 0}, r"(?s)2 failures.*features=0.*hidden=0"),
        ({"groups": 0}, "groups=0"),
    ],
)
def test_argument_errors(options, match):
    with pytest.raises(ShardingError, match=match):
        jax.eval_shape(lambda: layer(**options))


@pytest.mark.parametrize(
    ("options", "sizes", "match"),
    [
        ({"num_experts": 6}, {"data": 2, "expert": 4}, r"(?s)num_experts=6.*'expert' of size 4.*num_experts=8"),
        ({}, {"data": 8}, r"(?s)axis='expert'.*data=8.*sharding.mesh\(..., expert=1\)"),
        ({"hidden": 33}, {"expert": 4, "tensor": 2}, r"(?s)hidden=33.*hidden=34"),
        ({"groups": 7}, {"expert": 8}, r"(?s)groups=7.*96 tokens"),
        ({"features": 8}, {"expert": 8}, r"x of shape \(8, 12, 16\)"),
    ],
)
def test_mesh_errors(options, sizes, match):
    with sharding.mesh(sizes, devices=math.prod(sizes.values())):
        with pytest.raises(ShardingError, match=match):
            sharding.jit(lambda moe, x: moe(x)[0]).complete(jax.eval_shape(lambda: layer(**options)), tokens())


@pytest.mark.slow
def test_indivisible_tokens():
    x = tokens()[:1, :7]
    expected = call(layer(capacity_factor=math.inf), x)[0]
    with sharding.mesh(expert=8):
        found = sharding.jit(lambda moe, x: moe(x)[0])(layer(capacity_factor=math.inf), x)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), None])
def test_replicated_experts(factor):
    moe, x = layer(axis=None, capacity_factor=factor), tokens()
    with sharding.mesh(data=8):
        forward = sharding.jit(lambda moe, x: moe(x)[0], in_shardings=(None, P("data")))
        np.testing.assert_allclose(forward(moe, x), call(moe, x)[0], atol=1e-5)
        assert not forward.complete(moe, x).communication().by_kind()


def test_a_user_defined_router():
    class RoundRobin:
        """Assigns experts to tokens in turn."""

        def __init__(self, features, num_experts, top_k, *, rngs):
            self.num_experts = num_experts

        def __call__(self, x_GSM, key=None):
            experts = jnp.broadcast_to(jnp.arange(x_GSM.shape[1]) % self.num_experts, x_GSM.shape[:2])[..., None]
            ones, zero = jnp.ones(experts.shape), jnp.zeros(())
            return expert.Routing(experts, ones, ones > 0, {}, zero)

    moe = layer(router=RoundRobin, top_k=1, capacity_factor=math.inf)
    y, balance = call(moe, tokens())
    assert balance.load.max() == 16 and balance.load.min() == 8  # 12 tokens, 8 experts
    np.testing.assert_allclose(y, token_by_token(moe, tokens(), route(moe, tokens())), atol=1e-5)
