"""Slurm's compressed lists of host names."""

import pytest

from sharding.launch.hosts.slurm_nodelist import expand_nodelist


@pytest.mark.parametrize(
    ("text", "names"),
    [("n1", ["n1"]), ("n[1-3,7]", ["n1", "n2", "n3", "n7"]), ("a[08-10]-x,b", ["a08-x", "a09-x", "a10-x", "b"])],
)
def test_expand_nodelist(text: str, names: list[str]):
    assert expand_nodelist(text) == names
