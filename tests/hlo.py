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


def num_bytes(text: str) -> int:
    """Bytes of all that collectives give on one device, each time that they run; an unknown trip count is one."""
    own: dict[str, int] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    name = entry = ""
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            name = start[1]
            entry = name if line.startswith("ENTRY") else entry
        op = _OP.search(line)
        if op:
            own[name] = own.get(name, 0) + sum(map(_array_bytes, _ARRAY.findall(op[1])))
        trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
        for key, callees in _CALLED.findall(line):
            times = int(trips[1]) if trips and key == "body" else 1
            calls.setdefault(name, []).extend((callee, times) for callee in re.findall(r"%?([\w.\-]+)", callees))

    def total(name: str) -> int:
        return own.get(name, 0) + sum(times * total(callee) for callee, times in calls.get(name, []))

    return total(entry)


_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLS = ("body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
_CALLED = re.compile(rf"\b({'|'.join(_CALLS)})=\{{?(%[^,}}]*(?:, *%[^,}}]*)*)")


def _array_bytes(array: tuple[str, str]) -> int:
    kind, sizes = array
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    return math.prod(int(n) for n in sizes.split(",") if n) * bits // 8


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
