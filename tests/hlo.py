"""Counting collectives in the text of a compiled program, by the mesh axes that their groups run along."""

import math
import re
from collections import Counter

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OP = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")


def collectives(text: str, sizes: dict[str, int]) -> dict[str, Counter]:
    """Per computation of an HLO text, how many arrays each (kind, axes) moves; combined ones count one by one."""
    found: dict[str, Counter] = {}
    name = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name = start[1]
        op = _OP.search(line)
        if op:
            arrays = max(1, len(re.findall(r"\w+\[[\d,]*\]", op[1])))
            found.setdefault(name, Counter())[op[2], _axes(line, sizes)] += arrays
    return found


def total(text: str, sizes: dict[str, int]) -> Counter:
    """The same over all computations, each counted once."""
    return sum(collectives(text, sizes).values(), Counter())


def _axes(line: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """The axes that vary inside a collective's groups."""
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    coordinates = {int(devices[i]): i for i in np.ndindex(devices.shape)}
    group = _groups(line)[0]
    at = [coordinates[d] for d in group]
    return tuple(axis for k, axis in enumerate(sizes) if len({c[k] for c in at}) > 1)


def _groups(line: str) -> list[list[int]]:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
    if pairs:
        moves = [[int(x) for x in p.split(",")] for p in re.findall(r"\{(\d+,\d+)", "{" + pairs[1] + "}")]
        return [p for p in moves if p[0] != p[1]] or [[0]]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, reshape = ([int(x) for x in g.split(",")] for g in iota.groups()[:2])
        order = [int(x) for x in iota[3].split(",")] if iota[3] else range(len(reshape))
        return np.arange(math.prod(shape)).reshape(reshape).transpose(order).reshape(shape).tolist()
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        inside = [list(axes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        devices = np.arange(math.prod(axes.values())).reshape(tuple(axes.values()))
        width = math.prod(devices.shape[k] for k in inside)
        return np.moveaxis(devices, inside, range(-len(inside), 0)).reshape(-1, width).tolist()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    return [[int(x) for x in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else [[0]]
