"""Each feature of `jax.jit` does under `sharding.jit` what the table in `README.md` says."""

import jax
import pytest

from drop_in.comparison import Feature, features, verdict
from drop_in.table import row, written

FEATURES = features()
CRASHES = {"donated_twice_in_one_call"}
"""In XLA of JAX before 0.11, on several devices, also under `jax.jit`."""


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: f"{one.topic}-{one.name}")
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_feature(feature: Feature):
    if feature.name in CRASHES and jax.__version_info__ < (0, 11):
        pytest.skip("XLA crashes")
    assert verdict(feature) == written()[row(feature)]


def test_the_table_has_each_feature_once():
    assert list(written()) == [row(feature) for feature in FEATURES]
