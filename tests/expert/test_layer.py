"""The layer is what its experts make of each token, on every mesh; it says 2 all-to-alls forward and 2 backward."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixture import BATCH, EXPERTS, FEATURES, LENGTH, by_token, call, kept, layer, route, tokens, value_and_grad

import sharding
from sharding import P, ShardingError, expert
from sharding.cost import read_compiled
from sharding.expert import capacity

KEY = jax.random.key(2)
OPTIONS = {
    "gshard": {"capacity_factor": 1.0},
    "every place": {"capacity_factor": math.inf},
    "no places": {"capacity_factor": None},
    "switch": {"top_k": 1, "capacity_factor": 0.5},
    "three": {"top_k": 3},
    "three, no places": {"top_k": 3, "capacity_factor": None},
    "groups": {"groups": 16, "capacity_factor": 1.0},
}
QUICK = [
    name if name in ("gshard", "three, no places") else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS
]
MESHES = [{"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}, {"fsdp": 2, "expert": 2}]


def places(made, length):
    factor = math.inf if made.capacity_factor is None else made.capacity_factor
    return capacity.num_places(factor, tokens=length, top_k=made.top_k, num_experts=EXPERTS)


@functools.cache
def one_device(name):
    return jax.device_get(jax.jit(value_and_grad)(layer(**OPTIONS[name]), tokens(), KEY))


@pytest.mark.parametrize("name", QUICK)
def test_each_token_through_its_experts(name):
    made, x = layer(**OPTIONS[name]), tokens()
    x_GSM = x.reshape(made.groups or BATCH, -1, FEATURES)
    routing, here = route(made, x_GSM, KEY), places(made, x_GSM.shape[1])
    (_, (y, balance)), _ = one_device(name)
    np.testing.assert_allclose(y.reshape(x_GSM.shape), by_token(made, x_GSM, routing, here), atol=1e-5)
    found = kept(routing, here)
    assert balance.dropped == np.sum(np.asarray(routing.wanted_GSK) & ~found)
    assert (balance.dropped > 0) == (made.capacity_factor in (1.0, 0.5, 1.25))
    chosen = np.asarray(routing.experts_GSK)[np.asarray(routing.wanted_GSK)]
    np.testing.assert_array_equal(balance.load, np.bincount(chosen, minlength=EXPERTS))
    assert balance.auxiliary_loss == pytest.approx(float(routing.auxiliary_loss), rel=1e-5)


def test_infinite_capacity_is_the_dense_sum_of_two():
    made, x = layer(capacity_factor=math.inf), tokens()
    gates = jax.nn.softmax(x @ made.router.gate[...])
    every = jnp.einsum("bsfe,efm->bsem", jax.nn.gelu(jnp.einsum("bsm,emf->bsfe", x, made.up[...])), made.down[...])
    best = jnp.where(gates >= jnp.sort(gates, -1)[..., -2:-1], gates, 0)
    wanted = jnp.einsum("bse,bsem->bsm", best / best.sum(-1, keepdims=True), every)
    for other in (made, layer(capacity_factor=None)):
        np.testing.assert_allclose(call(other, x)[0], wanted, atol=1e-5)


def on_mesh(name, sizes):
    """What comes of it, and what XLA made of the program."""
    made, x = layer(**OPTIONS[name]), tokens()
    with sharding.mesh(sizes, devices=jax.devices()[: math.prod(sizes.values())]) as mesh:
        batch = tuple(axis for axis in sizes if axis != "tensor")
        step = sharding.jit(value_and_grad, in_shardings=(None, P(batch), None))
        compiled = step.lower(made, x, KEY).compile()
        return jax.device_get(compiled(made, x, KEY)), read_compiled(compiled, mesh=mesh)


def check(found, wanted):
    def same(a, b):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7

    (value, (y, balance)), gradients = found
    (value1, (y1, balance1)), gradients1 = wanted
    assert value == pytest.approx(float(value1), rel=1e-5)
    np.testing.assert_allclose(y, y1, atol=1e-5)
    np.testing.assert_array_equal(balance.dropped, balance1.dropped)
    np.testing.assert_array_equal(balance.load, balance1.load)
    np.testing.assert_array_equal((y == 0).all(-1), (y1 == 0).all(-1))  # the same tokens lose all
    jax.tree.map(same, gradients, gradients1)


@pytest.mark.parametrize(
    ("name", "sizes"), [("gshard", MESHES[1]), ("no places", MESHES[2])], ids=lambda value: str(value)
)
def test_a_mesh_changes_nothing_and_exchanges_tokens_four_times(name, sizes):
    found, facts = on_mesh(name, sizes)
    check(found, one_device(name))
    exchanges = {axes: number for (kind, axes), (number, _) in facts.by_axes().items() if kind == "all-to-all"}
    assert exchanges == {("expert",): 4}
    if name == "gshard":
        assert facts.by_kind().keys() == {"all-to-all", "all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_mesh_changes_anything(name, sizes):
    found, facts = on_mesh(name, sizes)
    check(found, one_device(name))
    assert facts.by_kind()["all-to-all"][0] == 4


@pytest.mark.parametrize("factor", [1.0, pytest.param(None, marks=pytest.mark.slow)])
def test_two_exchanges_forward(factor):
    made, x = layer(capacity_factor=factor), tokens()
    with sharding.mesh(data=2, expert=4):
        forward = sharding.jit(lambda made, x: made(x)[0], in_shardings=(None, P(("data", "expert"))))
        found = read_compiled(forward.lower(made, x).compile()).by_kind()
        assert forward.complete(made, x).communication().by_kind() == found
    assert found["all-to-all"][0] == 2


@pytest.mark.slow
def test_plain_jax_exchanges_as_often():
    made, x = layer(), tokens()
    with sharding.mesh(data=2, expert=4):
        placed = sharding.put(x, P(("data", "expert")))
        compiled = jax.jit(value_and_grad).lower(made, placed, KEY).compile()
        assert read_compiled(compiled).by_kind()["all-to-all"][0] == 4
        check(
            jax.device_get(jax.jit(value_and_grad)(made, placed, KEY)),
            jax.device_get(jax.jit(value_and_grad)(made, x, KEY)),
        )


@pytest.mark.slow
def test_a_mesh_of_one():
    made, x = layer(), tokens()
    with sharding.mesh(expert=1, devices=jax.devices()[:1]):
        found = jax.device_get(sharding.jit(value_and_grad)(made, x, KEY))
    check(found, jax.device_get(jax.jit(value_and_grad)(made, x, KEY)))


def test_gradients_reach_the_router_and_every_expert_that_is_used():
    made, x = layer(capacity_factor=None), tokens()[:1, :3]
    (_, (_, balance)), (gradients, _) = jax.jit(value_and_grad)(made, x, KEY)
    used = np.asarray(balance.load) > 0
    assert 0 < used.sum() < EXPERTS
    for leaf in (gradients.up, gradients.down):
        np.testing.assert_array_equal(np.any(leaf[...] != 0, axis=(1, 2)), used)
    without = jax.jit(jax.grad(lambda made: made(x, KEY)[0].sum()))(made)  # also without the auxiliary loss
    assert np.any(without.router.gate[...]) and np.any(gradients.router.gate[...])


@pytest.mark.parametrize("factor", [1.0, None])
def test_program_of_one_length_on_any_number_of_devices(factor):
    made = jax.eval_shape(lambda: layer(num_experts=64, top_k=2, capacity_factor=factor))
    x = jax.ShapeDtypeStruct((128, LENGTH, FEATURES), jnp.float32)
    lengths = set()
    for data, experts in [(2, 4), (4, 32)]:
        with sharding.mesh(data=data, expert=experts, devices=data * experts):
            step = sharding.jit(value_and_grad, in_shardings=(None, P(("data", "expert")), None))
            lengths.add(len(step.lower(made, x, KEY).as_text().splitlines()))
    assert len(lengths) == 1


def test_half_precision():
    made, x = layer(), tokens().astype(jnp.bfloat16)
    y, balance = call(made, x)
    assert y.dtype == jnp.bfloat16 and balance.auxiliary_loss.dtype == jnp.float32
    np.testing.assert_allclose(y.astype(jnp.float32), call(made, x.astype(jnp.float32))[0], atol=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity_factor": 0}, r"(?s)capacity_factor=0\).*places.*1.25"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
        ({"top_k": 9}, r"(?s)top_k=9.*num_experts=8"),
        ({"top_k": 0}, "top_k=0"),
        ({"router": "gshrad"}, r"(?s)router='gshrad'.*try: *router='gshard'"),
        ({"router": "switch"}, r"Switch\(top_k=2\)"),
        ({"hidden": 0, "features": 0}, r"(?s)2 failures.*features=0.*hidden=0"),
        ({"groups": 0}, "groups=0"),
    ],
)
def test_what_can_not_be(options, words):
    with pytest.raises(ShardingError, match=words):
        jax.eval_shape(lambda: layer(**options))


@pytest.mark.parametrize(
    ("options", "sizes", "words"),
    [
        ({"num_experts": 6}, {"data": 2, "expert": 4}, r"(?s)num_experts=6.*'expert' of size 4.*num_experts=8"),
        ({}, {"data": 8}, r"(?s)axis='expert'.*data=8.*sharding.mesh\(..., expert=1\)"),
        ({"hidden": 33}, {"expert": 4, "tensor": 2}, r"(?s)hidden=33.*hidden=34"),
        ({"groups": 7}, {"expert": 8}, r"(?s)groups=7.*96 tokens"),
        ({"features": 8}, {"expert": 8}, r"x of shape \(8, 12, 16\)"),
    ],
)
def test_what_a_mesh_can_not_have(options, sizes, words):
    with sharding.mesh(sizes, devices=math.prod(sizes.values())):
        with pytest.raises(ShardingError, match=words):
            sharding.jit(lambda made, x: made(x)[0]).complete(jax.eval_shape(lambda: layer(**options)), tokens())


@pytest.mark.slow
def test_tokens_that_no_axis_divides():
    x = tokens()[:1, :7]
    wanted = call(layer(capacity_factor=math.inf), x)[0]
    with sharding.mesh(expert=8):
        found = sharding.jit(lambda made, x: made(x)[0])(layer(capacity_factor=math.inf), x)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        with pytest.raises(ShardingError, match=r"(?s)1 x 7 tokens.*math.inf"):
            sharding.jit(lambda made, x: made(x)[0])(layer(capacity_factor=None), x)


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), None])
def test_all_experts_on_every_device(factor):
    made, x = layer(axis=None, capacity_factor=factor), tokens()
    with sharding.mesh(data=8):
        forward = sharding.jit(lambda made, x: made(x)[0], in_shardings=(None, P("data")))
        np.testing.assert_allclose(forward(made, x), call(made, x)[0], atol=1e-5)
        assert not forward.complete(made, x).communication().by_kind()


def test_its_own_router():
    class Round:
        """Tokens in turn."""

        def __init__(self, features, num_experts, top_k, *, rngs):
            self.num_experts = num_experts

        def __call__(self, x_GSM, key=None):
            experts = jnp.broadcast_to(jnp.arange(x_GSM.shape[1]) % self.num_experts, x_GSM.shape[:2])[..., None]
            ones, zero = jnp.ones(experts.shape), jnp.zeros(())
            return expert.Routing(experts, ones, ones > 0, {}, zero)

    made = layer(router=Round, top_k=1, capacity_factor=math.inf)
    y, balance = call(made, tokens())
    assert balance.load.max() == 16 and balance.load.min() == 8  # 12 tokens, 8 experts
    np.testing.assert_allclose(y, by_token(made, tokens(), route(made, tokens())), atol=1e-5)
