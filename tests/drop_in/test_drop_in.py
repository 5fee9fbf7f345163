"""Each feature of `jax.jit` does under `sharding.jit` what the table in `README.md` says."""

import pytest

from drop_in.comparison import Feature, features, verdict
from drop_in.table import row, written

FEATURES = features()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda one: f"{one.topic}-{one.name}")
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_feature(feature: Feature):
    assert verdict(feature) == written()[row(feature)]


def test_the_table_has_each_feature_once():
    assert list(written()) == [row(feature) for feature in FEATURES]
