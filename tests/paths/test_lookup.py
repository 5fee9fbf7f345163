"""Array names: paths of leaves, and lookup by the end of a path."""

import collections

import jax
import pytest
from flax import nnx

from sharding import ShardingError, paths

Moments = collections.namedtuple("Moments", "mu nu")
NAMES = {
    "state/blocks/0/mlp/w1": 0,
    "state/blocks/1/mlp/w1": 1,
    "state/head/w2": 2,
    "hidden#0": 3,
    "hidden#1": 4,
    "x": 5,
}
SPECS = ["a", "a", "b", "c", "d", "e"]


def find(name):
    return paths.find(NAMES, name, SPECS.__getitem__)


def test_paths_of_dicts_lists_tuples_and_named_tuples():
    tree = {"b": [1, (2, 3)], "a": Moments(4, {"k": 5})}
    assert paths.of_tree(tree, "state") == ["state/a/mu", "state/a/nu/k", "state/b/0", "state/b/1/0", "state/b/1/1"]


def test_path_of_a_single_leaf_is_its_prefix():
    assert paths.of_tree(1, "x") == ["x"]
    assert paths.of_tree(None, "x") == []


def test_value_of_an_nnx_variable_is_dropped():
    module = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert paths.of_tree(module, "model") == ["model/bias", "model/kernel"]
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(nnx.Param(1.0))
    assert paths.text(path, "p") == "p"


@pytest.mark.parametrize(
    "name, value",
    [
        ("state/blocks/1/mlp/w1", 1),
        ("blocks/1/mlp/w1", 1),
        ("1/mlp/w1", 1),
        ("w2", 2),
        ("hidden#1", 4),
        ("x", 5),
        ("mlp/w1", 0),  # two that are sharded identically
        ("w1", 0),
    ],
)
def test_found_by_name_path_or_end_of_path(name, value):
    assert find(name) == value


def test_end_of_a_path_matches_full_keys():
    with pytest.raises(ShardingError, match="no argument, result or annotated value of that name among 6"):
        find("1")


def test_ambiguous_matches_are_listed():
    with pytest.raises(ShardingError, match=r"(?s)2 values of that name, sharded differently:.*#0: c.*#1: d"):
        find("hidden")


def test_exact_name_takes_precedence_over_ends_of_paths():
    names = {"a/w": 0, "w": 1}
    assert paths.find(names, "w", lambda v: v) == 1


@pytest.mark.parametrize("name, near", [("hiden", "hidden#"), ("w3", "w2"), ("state/head/w", "state/head/w2")])
def test_unknown_name_suggests_the_nearest(name, near):
    with pytest.raises(ShardingError, match=f"(?s)fix: .*{near}"):
        find(name)


def test_unknown_name_without_a_near_one_suggests_nothing():
    with pytest.raises(ShardingError, match="no argument") as caught:
        find("qqqqqqqq")
    assert caught.value.fix == ()


def test_globs_are_names_too():
    assert paths.find_all(NAMES, "*/mlp/w1").keys() == {"state/blocks/0/mlp/w1", "state/blocks/1/mlp/w1"}
    assert find("blocks/mlp/w1") == 0


def test_many_matches_are_cut_short():
    names = {f"layers/{k}/w": k for k in range(11)}
    with pytest.raises(ShardingError, match=r"(?s)11 values of that name.*layers/7/w: 7.*and 3 more"):
        paths.find(names, "w", lambda v: v)
