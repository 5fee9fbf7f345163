"""Checks that all processes run the same program, with the same versions, flags, settings and data."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping
from importlib.metadata import version

import jax

from ..errors import ShardingError
from . import processes

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables that affect compilation or communication."""

SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")
"""JAX configuration options that affect compilation or numerics."""

_MAX_TEXT_BYTES = 3 << 20
"""The coordinator accepts messages of up to 4 MiB."""


def versions() -> dict[str, str]:
    """The installed versions that must be the same everywhere."""
    return {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def flags() -> dict[str, str]:
    """The settings of this process that affect compilation."""
    found = {name: os.environ[name] for name in FLAGS if name in os.environ}
    return found | {name: str(getattr(jax.config, name)) for name in SETTINGS}


def agree(facts: Mapping[str, str], *, about: str) -> None:
    """Checks that facts are identical in all processes, before a difference becomes a hang.

    Args:
        facts: name -> text that must be the same everywhere; compared by hash first.
        about: the operation that follows, for errors.

    Raises:
        ShardingError: a process differs, with its index, the name of the fact and the line.
    """
    if processes.count() == 1:
        return
    names = sorted(facts)
    mine = [f"{name} {hashlib.sha256(facts[name].encode(errors='surrogateescape')).hexdigest()}" for name in names]
    table = [text.split("\n") for text in processes.all_gather_text(about, "\n".join(mine))]
    if all(row == table[0] for row in table):
        return
    packed = _pack(facts)
    texts = [_unpack(row) for row in processes.all_gather_text(f"{about}: differences", packed)]
    processes.coordinator_waits(f"{about}: differences")  # else others may lose the connection while they read
    usual = max(table, key=table.count)
    first = table.index(usual)
    differences = [
        line
        for other, row in enumerate(table)
        if row != usual
        for line in _differences(other, texts[other], first, texts[first])
    ]
    raise ShardingError(
        about,
        found=differences,
        required="the same program, versions, flags, mesh and data in all processes",
        fix="the same environment and script on every host",
    )


def _pack(facts: Mapping[str, str]) -> str:
    packed = b85encode(zlib.compress(json.dumps(dict(facts)).encode())).decode()
    return packed if len(packed) <= _MAX_TEXT_BYTES else ""


def _unpack(text: str) -> dict[str, str]:
    return json.loads(zlib.decompress(b85decode(text))) if text else {}


def _differences(other: int, theirs: Mapping[str, str], first: int, usual: Mapping[str, str]) -> list[str]:
    """A line for each fact in which two processes differ."""
    if not (theirs and usual):
        return [f"process {other} differs from process {first}, in texts too long to compare"]
    lines = []
    for name in sorted(theirs.keys() | usual.keys()):
        one, two = theirs.get(name, ""), usual.get(name, "")
        if one != two:
            lines.append(f"process {other} differs from process {first} in {name}: {_first_difference(one, two)}")
    return lines


def _first_difference(one: str, two: str) -> str:
    old, new = two.splitlines(), one.splitlines()
    if len(old) <= 1 and len(new) <= 1:
        return f"{one or 'none'}, not {two or 'none'}"
    found = _first_pair(new, old) or _first_pair(one.splitlines(keepends=True), two.splitlines(keepends=True))
    assert found is not None, "equal texts"
    number, mine, theirs = found
    if mine.strip() != theirs.strip():
        mine, theirs = mine.strip(), theirs.strip()
    changed = sum(line[0] in "+-" for line in difflib.ndiff(old, new)) if len(old) + len(new) < 400 else 0
    more = f" ({changed} lines in all)" if changed > 2 else ""
    at = len(os.path.commonprefix([mine, theirs]))
    return f"line {number} is {_around(mine, at)!r}, not {_around(theirs, at)!r}{more}"


def _first_pair(new: list[str], old: list[str]) -> tuple[int, str, str] | None:
    """The number of the first line that differs, and that line of both; None if all are equal."""
    pairs = enumerate(itertools.zip_longest(new, old, fillvalue=""), 1)
    return next(((number, mine, theirs) for number, (mine, theirs) in pairs if mine != theirs), None)


def _around(text: str, at: int) -> str:
    """At most 120 characters of a text, with the one at a place."""
    start = 0 if at < 120 else at - 60
    return ("..." if start else "") + text[start : start + 120]
