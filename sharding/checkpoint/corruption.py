"""How corrupted checkpoints are detected and reported.

A JSON document is stored with a CRC-32 of its content, an array with a checksum independent of its mesh. A checkpoint
is corrupted if one of its parts is unreadable or has another checksum.
"""

import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .. import compat
from ..errors import ShardingError
from ..mesh import without_mesh
from .array_names import as_saved
from .directory import EXTRA, FACTS, Directory, Json, existing_step, first_line, read_json, steps
from .multiprocess_read import AllFacts, UnreadableError, on_one_device, read_arrays

_DOCUMENT, _CHECKSUM = "document", "crc32"


class CorruptedError(Exception):
    """A checkpoint is corrupted; the message says how."""


def verify(directory: Directory, step: int | None = None) -> dict[int, str]:
    """The corruption found in each checkpoint, or an empty text; by default of all steps, newest first.

    Reads every document and every array and compares their checksums, one checkpoint at a time, on the first device of
    this process: no mesh is needed.
    """
    chosen = [existing_step(directory, step)] if step is not None else reversed(steps(directory))
    return {each: _corruption(directory, each) for each in chosen}


def _corruption(directory: Directory, step: int) -> str:
    documents = {part: document_or_none(directory, step, part) for part in (FACTS, EXTRA)}
    unread = next((part for part, found in documents.items() if found is None), None)
    if unread:
        return unreadable(unread)
    facts = documents[FACTS]
    try:
        verified_arrays(directory, step, facts, on_one_device(facts))
    except CorruptedError as error:
        return str(error)
    return ""


def unreadable(part: str) -> str:
    """The description of a document that `document_or_none` did not return."""
    return f"{part}: unreadable, or checksum mismatch"


def verified_arrays(
    directory: Directory, step: int, facts: AllFacts, targets: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Reads the arrays named in `targets`, with the shardings given there. Raises CorruptedError."""
    try:
        arrays = read_arrays(directory, step, targets)
    except UnreadableError as error:
        raise CorruptedError(str(error)) from error
    wrong = [name for name, value in checksums(arrays).items() if value != facts[name]["checksum"]]
    if wrong:
        raise CorruptedError(f"checksum mismatch: {', '.join(wrong)}")
    with without_mesh():
        return {name: as_saved(arrays[name], leaf, facts[name].get("impl")) for name, leaf in targets.items()}


def with_checksum(document: Json) -> Json:
    """A document as stored: with its CRC-32."""
    return {_DOCUMENT: document, _CHECKSUM: _crc32(document)}


def _crc32(document: Json) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def _verified_document(directory: Directory, step: int, part: str) -> Json:
    found = read_json(directory, step, part)
    if found[_CHECKSUM] != _crc32(found[_DOCUMENT]):
        raise ValueError("checksum mismatch")
    return found[_DOCUMENT]


def document(directory: Directory, step: int, part: str) -> Json:
    """A JSON document of an existing checkpoint. Raises `corruption_error`."""
    try:
        return _verified_document(directory, step, part)
    except Exception as error:
        reason = f"{part}: {first_line(error)}"
    raise corruption_error(directory, step, reason, lambda older: document_or_none(directory, older, part) is not None)


def document_or_none(directory: Directory, step: int, part: str) -> Json:
    """A JSON document of a checkpoint; None if it is unreadable or corrupted."""
    try:
        return _verified_document(directory, step, part)
    except Exception:
        return None


def corruption_error(directory: Directory, step: int, reason: str, is_good: Callable[[int], bool]) -> ShardingError:
    """The error for a corrupted checkpoint; its fix is the newest older step that is good."""
    older = [known for known in reversed(steps(directory)) if known < step]
    good = next((known for known in older if is_good(known)), None)
    none = "all older checkpoints are corrupted too" if older else "no older checkpoint exists"
    return ShardingError(
        f"restore step {step} from {os.fspath(directory)!r}",
        found=reason,
        required="a checkpoint that is not corrupted",
        fix=none if good is None else f"step {good}, the newest older checkpoint that is not corrupted",
    )


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The checksum of every array, computed on its own devices; of a replicated one on one device of each process."""
    # One at a time: XLA:CPU of JAX 0.10.2 may hang when several programs with collectives are in flight at once on
    # fewer cores than devices. Remove block_until_ready when that release is no longer supported.
    jax.block_until_ready(arrays)
    with without_mesh():  # the arrays may be on other devices
        return {name: int(jax.block_until_ready(_computed(array))) for name, array in arrays.items()}


def _computed(array: jax.Array) -> jax.Array:
    if array.is_fully_replicated:
        array = array.addressable_data(0)
    shard_shape = array.sharding.shard_shape(array.shape)
    if math.prod(shard_shape) >= 2**31:  # JAX's indices have 31 bits
        return checksum(array)
    if len(array.sharding.device_set) == 1:
        return _of_one_device(array)
    return _of_shards(array.sharding)(array) if isinstance(array.sharding, NamedSharding) else checksum(array)


@jax.jit
def checksum(array: jax.Array) -> jax.Array:
    """The sum modulo 2^32 of every element's bits times an odd number derived from its position.

    A sum does not depend on the order, hence not on the mesh. Since the factor is odd, every change of one element
    changes the sum. XLA:CPU keeps the products, of four bytes each, for which `checksums` computes them in parts.
    """
    words = _words(_on_device(array))
    places = [jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) for dim in range(words.ndim)]
    return _sum(words, _position(places, words.shape))


@jax.jit
def _of_one_device(array: jax.Array) -> jax.Array:
    return _in_parts(_on_device(array), array.shape, (0,) * array.ndim)


@functools.lru_cache(maxsize=256)
def _of_shards(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The checksum of an array with this sharding, each shard in parts."""
    mesh, spec = sharding.mesh, sharding.spec

    @jax.jit
    def total(array: jax.Array) -> jax.Array:
        names = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        names += [()] * (array.ndim - len(names))

        def of_shard(shard: jax.Array) -> jax.Array:
            first = [jax.lax.axis_index(own) * n if own else 0 for own, n in zip(names, shard.shape, strict=True)]
            return jax.lax.psum(_in_parts(shard, array.shape, first), tuple(itertools.chain(*names)))

        return jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)(_on_device(array))

    return total


def _in_parts(shard: jax.Array, shape: Sequence[int], first: Sequence[Any]) -> jax.Array:
    """The part of a checksum that a shard adds, which begins at `first` of an array of this shape.

    Takes memory for one part of it.
    """
    flat = shard.reshape(-1)
    each = min(PART, flat.size)

    def of_part(start: Any, length: int) -> jax.Array:
        words = _words(jax.lax.dynamic_slice_in_dim(flat, start, length)).reshape(length, -1)
        wide = words.shape[1]
        local, places = start + jnp.arange(length), []
        for dim in reversed(range(shard.ndim)):
            places.append((first[dim] + local % shard.shape[dim]).astype(jnp.uint32)[:, None])
            local = local // shard.shape[dim]
        word = jax.lax.broadcasted_iota(jnp.uint32, (length, wide), 1)
        return _sum(words, _position([*reversed(places), word], (*shape, wide)))

    if not each:
        return jnp.uint32(0)
    parts, rest = divmod(flat.size, each)
    total = jax.lax.fori_loop(0, parts, lambda k, total: total + of_part(k * each, each), jnp.uint32(0))
    return total + of_part(parts * each, rest) if rest else total


PART = 2**18
"""Elements of a part."""


def _on_device(array: jax.Array) -> jax.Array:
    return jax.device_put(array, jax.memory.Space.Device) if compat.is_on_host(jax.typeof(array)) else array


def _words(array: jax.Array) -> jax.Array:
    """The bits of every element as 32-bit numbers; elements of more bits have a dim of several."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    info = jnp.iinfo(array.dtype) if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo(array.dtype)
    unsigned = jnp.dtype(f"uint{min(info.bits, 32)}")
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def _position(places: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """Positions in row-major order, modulo 2^32, of elements at these places in each dim."""
    position = jnp.uint32(0)
    for place, length in zip(places, shape, strict=True):
        position = position * jnp.uint32(length % 2**32) + place
    return position


def _sum(words: jax.Array, position: jax.Array) -> jax.Array:
    factor = position * jnp.uint32(2654435761) ^ (position >> 15)
    return jnp.sum(words * (factor | 1), dtype=jnp.uint32)
