"""Token orders, and the blocks of scores that each device computes."""

import jax.numpy as jnp
import numpy as np
import pytest

from sharding import ShardingError, sequence

DEVICES = [1, 2, 3, 4, 8]


def blocks_by_position(devices, causal, order, length, padded):
    """Reference: the table computed from the mask of every pair of positions."""
    numbers = np.arange(padded)
    in_order = sequence.zigzag(numbers, devices, dim=0) if order == "zigzag" else numbers
    chunks = in_order.reshape(devices, 2 if order == "zigzag" else 1, -1)
    table = np.zeros((devices, devices, chunks.shape[1], chunks.shape[1]), int)
    for device, step, i, j in np.ndindex(*table.shape):
        q, k = chunks[device, i].reshape(-1, 1), chunks[(device - step) % devices, j].reshape(1, -1)
        attended = (k < length) & ((k <= q) if causal else True) & (q < length)
        needed = (k < length) & ((k <= q) if causal else True)
        table[device, step, i, j] = 0 if not attended.any() else 2 if needed.all() else 1
    return table


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("order", sequence.ORDERS)
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_match_the_mask(devices, order, causal):
    padded = 6 * devices
    for length in (padded, padded - 1, padded - 4, devices):
        found = sequence.blocks(devices, causal=causal, order=order, length=length, padded=padded)
        np.testing.assert_array_equal(found, blocks_by_position(devices, causal, order, length, padded))


@pytest.mark.parametrize("devices", DEVICES)
def test_zigzag_balances_every_step(devices):
    table = sequence.blocks(devices, order="zigzag") > 0
    assert (table.sum(axis=(1, 2, 3)) == 2 * devices + 1).all()
    assert (table.sum(axis=(2, 3)) == [3, *[2] * (devices - 1)]).all()


@pytest.mark.parametrize("devices", DEVICES)
def test_plain_order_gives_the_last_device_the_most_blocks(devices):
    table = sequence.blocks(devices) > 0
    np.testing.assert_array_equal(table.sum(axis=(1, 2, 3)), np.arange(1, devices + 1))


@pytest.mark.parametrize("devices", DEVICES)
def test_zigzag_roundtrip(devices):
    x = np.arange(2 * 4 * devices).reshape(2, 4 * devices)
    zigzag = sequence.zigzag(jnp.asarray(x), devices)
    np.testing.assert_array_equal(sequence.zigzag(x, devices), zigzag)
    np.testing.assert_array_equal(sequence.unzigzag(zigzag, devices), x)
    np.testing.assert_array_equal(zigzag[0, :4], [0, 1, 4 * devices - 2, 4 * devices - 1])  # the first and last chunks


def test_an_indivisible_length_is_an_error():
    with pytest.raises(ShardingError, match="6 positions, 4 chunks"):
        sequence.zigzag(np.zeros((1, 6)), 2)
