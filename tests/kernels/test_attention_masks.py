"""Bands and blocks against masks that are written out."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from sharding.kernels.attention_masks import Band, Blocks

BANDS = [
    Band.of(causal, window)
    for causal, window in itertools.product((False, True), (None, 0, 3, (5, 1), (0, 40), (20, 2)))
]
LENGTHS = [(12, 12), (7, 30), (31, 8), (1, 1), (33, 32)]


def mask(band, num_queries, num_keys):
    """By the definition, position by position."""
    seen = np.zeros((num_queries, num_keys), bool)
    for t, s in itertools.product(range(num_queries), range(num_keys)):
        early = band.before is not None and s < t - band.before
        late = band.after is not None and s > t + band.after
        seen[t, s] = not early and not late
    return seen


def test_band_of_options():
    assert Band.of(True, None) == Band(before=None, after=0)
    assert Band.of(True, 4) == Band.of(False, (4, 0)) == Band(before=4, after=0)
    assert Band.of(False, 4) == Band(before=4, after=4)
    assert not Band.of(False, None).is_bounded


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_visited_blocks_are_those_that_are_seen(lengths):
    for band, most in itertools.product(BANDS, [(4, 8), (8, 4), (40, 3)]):
        blocks = Blocks.of(*lengths, most)
        t, s = blocks.query_block, blocks.key_block
        padded = np.zeros((lengths[0] + blocks.query_padding, lengths[1] + blocks.key_padding), bool)
        padded[: lengths[0], : lengths[1]] = mask(band, *lengths)
        assert padded.shape[0] % t == padded.shape[1] % s == 0
        found = {(block.query, block.key): block.is_partial for block in blocks.visited(band)}
        for i, j in itertools.product(range(padded.shape[0] // t), range(padded.shape[1] // s)):
            part = padded[i * t : (i + 1) * t, j * s : (j + 1) * s]
            assert ((i, j) in found) == part.any()
            real = part[: lengths[0] - i * t]  # padded queries may see anything
            assert not part.any() or found[i, j] == (not real.all())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks_of_blocks(lengths):
    for band in BANDS:
        blocks = Blocks.of(*lengths, (8, 5))
        query, key = np.arange(lengths[0])[:, None], np.arange(lengths[1] + blocks.key_padding)[None]
        found = blocks.sees(band, jnp.asarray(query), jnp.asarray(key))
        expected = np.pad(mask(band, *lengths), [(0, 0), (0, blocks.key_padding)])
        np.testing.assert_array_equal(np.broadcast_to(True if found is None else found, expected.shape), expected)


@pytest.mark.parametrize("length, most, multiple, block", [(7, 512, 1, 7), (7, 512, 128, 128), (1100, 512, 128, 384)])
def test_blocks_are_even(length, most, multiple, block):
    assert Blocks.of(length, length, (most, most), multiple).query_block == block


def test_causal_blocks_are_about_half():
    blocks = Blocks.of(4096, 4096, (512, 512))
    assert len(blocks.visited(Band.of(True, None))) == 8 * 9 / 2
    assert len(blocks.visited(Band.of(True, 511))) == 8 + 7
