"""Specs of argument and result leaves: pytree prefixes, committed arrays."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import sharding
from sharding import P, ShardingError
from sharding.jit.argument_shardings import broadcast_specs, leaf_annotations, with_committed_shardings

U = P.UNCONSTRAINED
X = np.ones((8, 6), np.float32)


@pytest.fixture(autouse=True)
def mesh():
    with sharding.mesh(data=2, tensor=4) as m:
        yield m


TREES = [{"a": 1, "b": [2, 3]}, 4]


@pytest.mark.parametrize(
    "specs, expected",
    [
        (None, [None] * 4),
        (P("data"), [P("data")] * 4),
        ((P("data"), None), [P("data")] * 3 + [None]),
        ([None, P()], [None] * 3 + [P()]),
        (({"a": None, "b": P("data")}, P()), [None, P("data"), P("data"), P()]),
        (({"a": P(), "b": [None, P("tensor")]}, None), [P(), None, P("tensor"), None]),
    ],
)
def test_specs_are_a_pytree_prefix(specs, expected):
    assert broadcast_specs(specs, TREES, "in_shardings", "f") == expected


@pytest.mark.parametrize(
    "specs, message",
    [
        ((P(),), r"(?s)2 arguments.*fix: +in_shardings=\(None, None\)"),
        ({"a": P()}, "2 arguments, and in_shardings is {'a'"),
        (({"a": P()}, None), r"(?s)in_shardings\[0\].*the argument is \{'a'.*'b'"),
        ((None, [P()]), r"in_shardings\[1\]"),
        (({"a": None, "b": [P()]}, None), r"different lengths of list at \['b'\]"),
    ],
)
def test_specs_that_are_no_prefix_are_an_error_with_the_path(specs, message):
    with pytest.raises(ShardingError, match=message):
        broadcast_specs(specs, TREES, "in_shardings", "f")


def test_a_long_tree_is_cut_to_160_characters_in_an_error():
    for number in range(1, 80):
        tree = {"a": [1.0] * number}
        whole = f"the argument is {jax.tree.structure(tree)}".replace("PyTreeDef(", "").removesuffix(")")
        with pytest.raises(ShardingError, match="the argument is") as error:
            broadcast_specs(({"a": [P()] * (number + 1)},), [tree], "in_shardings", "f")
        text = next(line for line in error.value.found if line.startswith("the argument is"))
        shown = text.removeprefix("the argument is ")
        assert text == whole or (shown.endswith("...") and len(shown) == 160 and whole.startswith(text[:-3]))


def test_error_of_out_shardings_names_the_result():
    with pytest.raises(ShardingError, match=r"(?s)f: out_shardings\n.*the result is .*different types"):
        broadcast_specs((P(), P()), [{"a": 1}], "out_shardings", "f")


def annotations_of(*specs):
    return leaf_annotations(
        specs, [X] * len(specs), list("xyz")[: len(specs)], sharding.mesh(data=2, tensor=4).mesh, **WHAT
    )


WHAT = {"what": "in_shardings", "function": "f"}


def test_one_error_lists_all_indivisible_dims():
    with pytest.raises(ShardingError, match=r"(?s)3 failures.*f\(x\).*6 = 1 x 4 \+ 2.*f\(y\).*names 'dat'.*f\(z\)"):
        annotations_of(P(None, "tensor"), P("dat"), 3)


def test_open_spec_is_no_annotation():
    assert annotations_of(None, P(U, U), P((...,), U)) == [None, None, None]


def place(mesh, *entries):
    return jax.device_put(X, NamedSharding(mesh, P(*entries)))


@pytest.mark.parametrize("asked", [None, P("data"), P(("data", ...)), P(U), P(U, U), P((...,), None)])
def test_committed_array_keeps_its_sharding(mesh, asked):
    (annotation,) = with_committed_shardings([place(mesh, "data")], annotations_of(asked), ["x"], mesh, "f")
    assert annotation is not None
    assert str(annotation.spec) == "[data, -]"


@pytest.mark.parametrize("asked", [P("tensor"), P(), P(None, "data"), P(("tensor", ...)), P(("data", "tensor"))])
def test_conflicting_committed_array_is_an_error(mesh, asked):
    with pytest.raises(ShardingError, match=r"(?s)f\(x\).*committed to P\('data',?\).*in_shardings requires"):
        with_committed_shardings([place(mesh, "data")], annotations_of(asked), ["x"], mesh, "f")


@pytest.mark.parametrize("other", ["names", "order", "one device"])
def test_array_from_another_mesh_is_an_error(mesh, other):
    names = ("data", "model") if other == "names" else ("data", "tensor")
    devices = mesh.devices[::-1] if other == "order" else mesh.devices
    elsewhere = NamedSharding(jax.sharding.Mesh(devices, names), P("data"))
    if other == "one device":
        elsewhere = SingleDeviceSharding(jax.devices()[3])
    with pytest.raises(ShardingError, match=r"(?s)f\(x\).*an array on .*mesh is \{'data': 2, 'tensor': 4\}"):
        with_committed_shardings([jax.device_put(X, elsewhere)], [None], ["x"], mesh, "f")
