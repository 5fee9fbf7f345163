"""Slurm's compressed lists of host names."""

import re


def expand_nodelist(nodes: str) -> list[str]:
    """The host names of a Slurm node list such as `n[1-3,7],login`."""
    found = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", nodes):
        match = re.fullmatch(r"([^\[]+)(?:\[([^\]]*)\])?(.*)", part)
        assert match is not None
        head, ranges, tail = match.groups()
        if ranges is None:
            found.append(part)
            continue
        for each in ranges.split(","):
            low, _, high = each.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            found += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return found
