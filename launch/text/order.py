"""The order in which windows are seen: another permutation every epoch, each a function of seed and epoch alone.

It is computed where it is asked, by a Feistel network that walks until it is inside [Black & Rogaway, Ciphers with
Arbitrary Finite Domains, 2002, section 4]: nothing is stored, any step can be asked first, and it does not depend on
the version of a library.
"""

import numpy as np

NUM_ROUNDS = 6


def shuffled(positions: np.ndarray, *, count: int, seed: int) -> np.ndarray:
    """The windows at `positions`, counted from the first epoch on: in each epoch all of `count`, each once."""
    epochs, inside = np.divmod(positions.astype(np.int64), count)
    found = np.empty_like(inside)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permuted(inside[here], count=count, keys=_keys(seed, int(epoch)))
    return found


def permuted(numbers: np.ndarray, *, count: int, keys: np.ndarray) -> np.ndarray:
    """Where each of `numbers`, all below `count`, goes in the permutation of `range(count)` that `keys` give."""
    half_bits = max(1, -(-(count - 1).bit_length() // 2))
    values = _feistel(numbers.astype(np.uint64), half_bits, keys)
    # At most 4 * count values go round: a few walks on average bring all inside.
    while (outside := values >= count).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return left << bits | right


def _keys(seed: int, epoch: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        start = _mixed(_mixed(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch % 2**64))
        return _mixed(start + np.arange(1, NUM_ROUNDS + 1, dtype=np.uint64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """The bits of each value mixed: the finalizer of SplitMix64 [Steele, Lea & Flood, 2014, figure 11]."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
