"""The mesh axes of an MoE layer: those that divide what they shard, and sizes that an error suggests."""

import itertools
import math
import re

import pytest

import sharding
from sharding import P, ShardingError
from sharding.expert.expert_axes import MeshAxes, resolve_axes

SIZES = {"data": 2, "expert": 3, "seq": 4}


def resolved(**options) -> MeshAxes | None:
    given = {"axis": "expert", "batch": ("data",), "hidden": None, "length": None, "num_experts": 8, "features": 12}
    return resolve_axes("expert.MoE", **given | options)


@pytest.mark.parametrize("length", [None, "seq"])
@pytest.mark.parametrize("expert", [None, "expert"])
@pytest.mark.parametrize("batch", [(), ("data",)])
def test_the_most_axes_that_divide(batch: tuple[str, ...], expert: str | None, length: str | None):
    axes = MeshAxes(expert=expert, batch=batch, hidden=None, length=length, sizes=SIZES)
    assert axes.expert_axis_size == (SIZES[expert] if expert else 1)
    of_groups = batch + ((expert,) if expert else ())
    of_tokens = of_groups + ((length,) if length else ())
    for number in range(1, 50):
        for names, found in ((of_groups, axes.group_axes(number)), (of_tokens, axes.token_axes(number))):
            prefixes = [names[:end] for end in range(len(names) + 1)]
            fitting = [one for one in prefixes if number % math.prod(SIZES[name] for name in one) == 0]
            assert found == fitting[-1]
        assert axes.slot_axis(number) == (length if length and number % SIZES[length] == 0 else None)


def test_tokens_are_sharded_over_all_axes_or_not_as_groups():
    axes = MeshAxes(expert="expert", batch=("data",), hidden=None, length="seq", sizes=SIZES)
    assert axes.token_spec(12, 8) == P(("data", "expert"), "seq")
    assert axes.token_spec(8, 8) is None and axes.token_spec(12, 6) is None
    alone = MeshAxes(expert=None, batch=(), hidden=None, length=None, sizes=SIZES)
    assert alone.token_spec(5, 7) == P(None, None)


def test_axes_of_the_mesh():
    with sharding.mesh(data=2, expert=2, tensor=2):
        found = resolved(batch=("fsdp", "data", "expert"), hidden="tensor", length="seq")
        assert found is not None and dict(found.sizes) == {"data": 2, "expert": 2, "tensor": 2}
        assert (found.expert, found.batch, found.hidden, found.length) == ("expert", ("data",), "tensor", None)
        other = resolved(axis=None, batch=(), hidden="model", length="data")
        assert other is not None and (other.expert, other.hidden, other.length) == (None, None, "data")
    assert resolved() is None  # no mesh, nothing to shard


def test_numbers_of_experts_and_features_that_are_suggested_fit():
    """Each is the next larger one; whatever divides is accepted."""
    for num_experts, features in itertools.product(range(1, 14), (4, 6, 7, 8)):
        with sharding.mesh(expert=4, tensor=2):
            options = {"num_experts": num_experts, "features": features, "hidden": "tensor"}
            while True:
                try:
                    resolved(**options)
                    break
                except ShardingError as error:
                    name, value = re.fullmatch(r"(num_experts|hidden)=(\d+)", error.fix[0]).groups()
                    options["features" if name == "hidden" else name] = int(value)
            assert options["num_experts"] == min(n for n in range(num_experts, 20) if n % 4 == 0)
            assert options["features"] == min(n for n in range(features, 20) if n % 2 == 0)


def test_an_axis_that_the_mesh_lacks():
    with sharding.mesh(data=8), pytest.raises(ShardingError, match="data=8") as caught:
        resolved()
    assert any("expert=1" in fix for fix in caught.value.fix)
