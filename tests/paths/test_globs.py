"""Globs: from the start of any key to the end of a path, with and without indices."""

import pytest

from sharding.paths import Glob, unmatched

PATHS = ["blocks/0/mlp/w1", "blocks/1/mlp/w1", "mlp/~/linear_0/w", "q_proj/kernel", "deep/q_proj/kernel", "hidden#0"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("blocks/0/mlp/w1", [0]),
        ("mlp/w1", [0, 1]),
        ("lp/w1", []),
        ("w1", [0, 1]),
        ("blocks/*/w1", [0, 1]),
        ("blocks/[1]/*", [1]),
        ("blocks/mlp/w1", [0, 1]),
        ("*/linear_?/w", [2]),
        ("*/q_proj/kernel", [3, 4]),
        ("hidden", [5]),
        ("hid*", [5]),
        ("mlp", []),
        ("*", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_matches(pattern, matched):
    assert Glob(pattern).among(PATHS) == [PATHS[k] for k in matched]


def test_a_path_with_characters_of_a_glob_matches_itself():
    assert Glob("a[0]/w").matches("a[0]/w")


def test_an_unmatched_pattern_suggests_the_nearest_path_without_its_index():
    assert unmatched("asked", "*/w1", PATHS) is None
    error = unmatched("asked", "*/mlp/w3", PATHS)
    assert error is not None
    assert "no match among 6 paths" in str(error) and "blocks/mlp/w1" in error.fix
