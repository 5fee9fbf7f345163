"""Of what the shards of a rotated dim are made, against `numpy.roll`."""

import numpy as np
import pytest

from sharding.rewrite.rotation import Rotation


def turned(x, pieces, rows):
    """The shards of a padded array after a rotation, by its pieces: the ends of shards before, then the starts."""
    shards, found = x.reshape(-1, rows), []
    for k in range(len(shards)):
        (first, *rest) = [(n, shards[(k - away) % len(shards)]) for n, away in pieces]
        parts = [first[1][rows - first[0] :], *(shard[:n] for n, shard in rest)]
        found.append(np.concatenate(parts))
    return np.concatenate(found)


@pytest.mark.parametrize("shift", range(12))
@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6])
def test_even_shards(shift, num_shards):
    x = np.arange(12)
    (pieces,) = Rotation(dim=0, shift=shift, cut=None).pieces(len(x), num_shards)
    np.testing.assert_array_equal(turned(x, pieces, 12 // num_shards), np.roll(x, shift))


@pytest.mark.parametrize("shift", range(11))
@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
def test_uneven_shards(shift, num_shards):
    """A rotation of the padded array is right from the shift on, one past the padding before it."""
    length, rows = 11, -(-11 // num_shards)
    x = np.concatenate([np.arange(length), np.full(-length % rows, -1)])
    found = Rotation(dim=0, shift=shift, cut=None).pieces(length, num_shards)
    assert len(found) == (2 if shift and len(x) > length else 1)
    late, early = turned(x, found[0], rows), turned(x, found[-1], rows)
    expected = np.roll(np.arange(length), shift)
    np.testing.assert_array_equal(late[shift:length], expected[shift:])
    np.testing.assert_array_equal(early[:shift], expected[:shift])
