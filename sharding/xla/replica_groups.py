"""Replica groups of a compiled collective, and the mesh axes they span.

XLA prints groups in four forms: a list (`replica_groups={{0,1},{2,3}}`), an iota tile assignment
(`replica_groups=[2,4]<=[4,2]T(1,0)`), axes of a mesh (`replica_groups=mesh['x'=2,'y'=4] {'y'}`, possibly with a
sub-axis `'y':(1)2` or explicit device ids) and source-target pairs
(https://openxla.org/xla/operation_semantics; `xla/hlo/ir/replica_group.cc` and `mesh_and_axis.cc` print them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from sharding.errors import ShardingError
from sharding.spec import Axis

Groups = list[list[int]]
"""Logical device ids per group."""


def read_groups(attributes: str, num_devices: int) -> Groups:
    """The replica groups of a collective; for a permute its source-target pairs.

    Args:
        attributes: the instruction's text behind the operands.
        num_devices: of the program; missing or empty groups mean one group of all devices.

    Raises:
        ShardingError: if the groups are in another form.
    """
    for pattern, read in _FORMS:
        found = pattern.search(attributes)
        if found:
            return read(found)
    written = re.search(r"replica_groups=(?!\{\}).{1,60}", attributes)
    if written:
        required = "a list, an iota tile assignment, mesh axes or source-target pairs"
        raise ShardingError("replica groups of a compiled collective", found=written[0], required=required)
    return [list(range(num_devices))]


def mesh_axes(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that the groups span, in mesh order.

    Raises:
        ShardingError: if a device is not in the mesh.
    """
    num_devices = math.prod(sizes.values())
    highest = max((max(group) for group in groups if group), default=0)
    if highest >= num_devices:
        raise wrong_mesh_error(sizes, found=f"a collective with device {highest}")
    coords = [np.unravel_index(group, tuple(sizes.values())) for group in groups if len(group) > 1]
    return tuple(axis for k, axis in enumerate(sizes) if any((at[k] != at[k][0]).any() for at in coords))


def mesh_subaxes(groups: Groups, sizes: Mapping[str, int]) -> tuple[Axis, ...]:
    """The axes or sub-axes that the groups span; for groups that are not source-target pairs."""
    axes = mesh_axes(groups, sizes)
    found = {tuple(_subaxis(group, axis, sizes) for axis in axes) for group in groups}
    subaxes = found.pop() if len(found) == 1 else ()
    subsizes = [subaxis[2] if isinstance(subaxis, tuple) else sizes[subaxis] for subaxis in subaxes if subaxis]
    is_product = len(subsizes) == len(axes) and all(math.prod(subsizes) == len(group) for group in groups)
    return tuple(subaxis for subaxis in subaxes if subaxis) if is_product else axes


def _subaxis(group: list[int], axis: str, sizes: Mapping[str, int]) -> Axis | None:
    """The axis or sub-axis that a group spans, as in a `Spec`; None if its devices are not evenly spaced."""
    at = np.unique(np.unravel_index(group, tuple(sizes.values()))[list(sizes).index(axis)])
    if len(at) < 2:
        return None
    step = int(at[1] - at[0])
    before, rest = divmod(sizes[axis], len(at) * step)
    if rest or at[0] % (len(at) * step) >= step or (np.diff(at) != step).any():
        return None
    return axis if before == step == 1 else (axis, before, len(at))


def wrong_mesh_error(sizes: Mapping[str, int], *, found: str) -> ShardingError:
    """The error for a mesh that a program wasn't compiled for."""
    axes = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    return ShardingError(
        f"mesh({axes}) for the collectives of a compiled program",
        found=f"{found}; the mesh has {math.prod(sizes.values())} devices, numbered from 0",
        required="the mesh that the program was compiled for",
    )


def _read_pairs(found: re.Match[str]) -> Groups:
    return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", found[1])]


def _read_list(found: re.Match[str]) -> Groups:
    return [_integers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]


def _read_iota(found: re.Match[str]) -> Groups:
    return _iota(found[1], found[2]).tolist()


def _read_mesh_axes(found: re.Match[str]) -> Groups:
    sizes = {quoted or plain: int(size) for quoted, plain, size in re.findall(rf"{_AXIS}=(\d+)", found[1])}
    subaxes = [
        (quoted or plain, int(pre or 1), int(size or sizes[quoted or plain]))
        for quoted, plain, pre, size in re.findall(rf"{_AXIS}(?::\((\d+)\)(\d+))?", found[3])
    ]
    factors: list[tuple[str, int, int]] = []  # axes factored at the bounds of sub-axes: (axis, pre-size, size)
    for axis, size in sizes.items():
        bounds = sorted({1, size, *(bound for name, pre, n in subaxes if name == axis for bound in (pre, pre * n))})
        factors += [(axis, low, high // low) for low, high in zip(bounds, bounds[1:], strict=False)]
    grouped = [
        i
        for name, pre, size in subaxes
        for i, (axis, low, _) in enumerate(factors)
        if axis == name and pre <= low < pre * size
    ]
    devices = _device_ids(found[2], math.prod(sizes.values())).reshape([size for *_, size in factors])
    group_size = math.prod(devices.shape[i] for i in grouped)
    return np.moveaxis(devices, grouped, range(-len(grouped), 0)).reshape(-1, group_size).tolist()


def _device_ids(text: str | None, num_devices: int) -> np.ndarray:
    """The device ids of a mesh, major axis first; 0, 1, ... unless XLA prints them."""
    if not text:
        return np.arange(num_devices)
    return _iota(str(num_devices), text) if "[" in text else np.array(_integers(text))


def _iota(shape: str, order: str) -> np.ndarray:
    """`[4,2]T(1,0)`: an iota of these dims, transposed and reshaped to `shape`."""
    dims, _, permutation = order.partition("T")
    iota = np.arange(math.prod(_integers(dims))).reshape(_integers(dims))
    return (iota.transpose(_integers(permutation)) if permutation else iota).reshape(_integers(shape))


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


_AXIS = r"(?:'([^']+)'|([\w.\-]+))"
_FORMS = (
    (re.compile(r'source_target_pairs="?\{((?:\{\d+,\d+\},?)*)\}'), _read_pairs),
    (re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)"), _read_iota),
    (
        re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:\([\d,]*\)|[^()])*)\))? \{([^}]*)\}"),
        _read_mesh_axes,
    ),
    (re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}"), _read_list),
)
