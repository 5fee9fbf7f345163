"""Placement policies."""

import itertools

import pytest

from sharding.pipeline.cutting import POLICIES, Machines
from sharding.pipeline.cutting.stage_placement import place

THREE = Machines(machines=3, devices=4, inside=10, between=1)


@pytest.mark.parametrize(
    ("policy", "used", "count", "devices"),
    [
        ("fresh-first", (0, 0, 0), 3, (0, 1, 2)),
        ("fresh-first", (3, 0, 0), 4, (4, 5, 6, 7)),
        ("fresh-first", (3, 0, 0), 5, (4, 5, 6, 7, 8)),
        ("fresh-first", (3, 2, 0), 6, (3, 6, 8, 9, 10, 11)),
        ("append-first", (0, 0, 0), 5, (0, 1, 2, 3, 4)),
        ("append-first", (3, 0, 0), 4, (3, 4, 5, 6)),
        ("append-first", (3, 0, 2), 4, (3, 4, 10, 11)),
        ("scatter-first", (0, 0, 0), 3, (0, 4, 8)),
        ("scatter-first", (0, 0, 0), 5, (0, 1, 4, 5, 8)),
        ("scatter-first", (1, 1, 0), 4, (1, 2, 5, 6)),
        ("scatter-first", (3, 1, 0), 5, (3, 5, 6, 7, 8)),
        ("scatter-first", (4, 4, 0), 2, (8, 9)),
    ],
)
def test_policies(policy, used, count, devices):
    assert place(policy, THREE, used, count) == devices


def test_all_policies_agree_on_all_free_devices():
    for used in itertools.product(range(5), repeat=3):
        free = tuple(4 * machine + device for machine in range(3) for device in range(used[machine], 4))
        assert {place(policy, THREE, used, len(free)) for policy in POLICIES} == {free}
