"""Calibration: compute rates, bandwidths and overheads of attached devices, measured with micro-benchmarks.

Every benchmark runs on all devices of a mesh at once, each on its own data, so that contention for shared resources
(CPU cores, host memory, a network card) is included. The fastest of repeated runs counts. Dispatch overhead is excluded
by timing a loop with more iterations against one with fewer.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import hardware
from ..errors import ShardingError
from ..hardware import Chip, MeasuredCollective, Rates
from ..xla.collective_ops import KINDS, Kind, wire_bytes
from .topology import Level, topology

Say = Callable[[str], None]
"""Called with one line per measurement."""


POLYNOMIAL = 128
"""Terms of the polynomial that measures elementwise arithmetic: enough that memory does not bound it."""
MOST_STEPS = 10_000
"""Iterations of a measured loop beyond which it is not lengthened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes and repetitions of the benchmarks."""

    matmul_size: int = 512
    """Initial rows and columns of a matrix; doubled up to 16-fold until a product takes `least_seconds`."""
    copy_bytes: int = 16 << 20
    """Per device, exceeds the caches; quadrupled up to 256-fold until a copy takes `least_seconds`."""
    vector_elements: int = 1 << 16
    """Per device, fits the caches; quadrupled up to 1,024-fold until the arithmetic takes `least_seconds`."""
    message_bytes: tuple[int, ...] = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
    """Of collectives, as `wire_bytes` counts them."""
    num_repeats: int = 5
    """Runs, of which the fastest counts."""
    num_steps: int = 8
    """Initial extra iterations of a benchmark loop; quadrupled until they take long enough."""
    least_seconds: float = 2e-3
    """Least time of the extra iterations, and of one on the largest arrays, beside which a launch is negligible."""
    least_calls: float = 3
    """The same, as a multiple of a call with one iteration."""


QUICK = Effort(
    matmul_size=128,
    copy_bytes=1 << 20,
    vector_elements=1 << 12,
    message_bytes=(1 << 10, 1 << 16),
    num_repeats=2,
    num_steps=8,
    least_seconds=0,
    least_calls=0.5,
)
"""A first impression within seconds; results may be off by a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A measured chip."""

    chip: Chip
    how: dict[str, Any]
    """Provenance: machine, versions, mesh."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration file that `sharding.hardware.load` reads."""
        hardware.save(self.chip, os.fspath(path), how=self.how)


def calibrate(
    m: Mesh | AbstractMesh, *, like: str | None = None, effort: Effort | None = None, say: Say | None = None
) -> Calibration:
    """Measure the devices of a mesh.

    Args:
        m: a mesh over attached devices. Collectives are measured over each of its axes, and over all of them together.
        like: name of the chip that supplies the numbers that are not measured (int8, memory, ...); by default the one
            recognised from the `device_kind`.
        effort: sizes and repetitions.
        say: called with each result.

    Raises:
        ShardingError: if the devices are only described, or their chip is not recognised.

    Example:
        with sharding.mesh(data=-1) as mesh:
            measured = cost.calibrate(mesh, effort=cost.QUICK)
        measured.save("machine.json")
    """
    if not isinstance(m, Mesh):
        raise ShardingError("a calibration", found="described devices", required="attached devices")
    effort, say = effort or Effort(), say or (lambda line: None)
    known = _chip(m, like)
    rates = _rates(m, known.rates, effort, say)
    measured = replace(
        known,
        rates=rates,
        memory_bytes_per_second=_copy_bytes_per_second(m, effort, say),
        matmul_share=1.0,
        memory_share=1.0,
        op_seconds=_op_seconds(m, effort, say),
        shares_cores=False,
        collectives=tuple(_collectives(m, known, effort, say)),
    )
    return Calibration(chip=measured, how=_how(m, known))


def _chip(m: Mesh, like: str | None) -> Chip:
    if like is not None:
        return hardware.chip(like)
    device: Any = m.devices.flat[0]
    known = hardware.recognised(device.platform, device.device_kind)
    if known is None:
        raise ShardingError(
            f"a calibration of {device.device_kind}",
            found="no built-in chip of that kind",
            required="a built-in chip, for the numbers that are not measured",
            fix=[f"like={name!r}" for name, one in hardware.CHIPS.items() if one.platform == device.platform][:3],
        )
    return known


def _how(m: Mesh, known: Chip) -> dict[str, Any]:
    device: Any = m.devices.flat[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device_kind": device.device_kind,
        "num_devices": m.size,
        "num_host_cores": os.cpu_count(),
        "devices_share_cores": known.shares_cores,
        "rates": "of one device while all run",
        "mesh": {str(name): int(size) for name, size in m.shape.items()},
        "jax": jax.__version__,
    }


def _rates(m: Mesh, known: Rates, effort: Effort, say: Say) -> Rates:
    def matmul(name: str, dtype: Any, precision: str) -> float:
        rate = _matmul_flops_per_second(m, dtype, precision, effort)
        say(f"matmul {name:<18} {rate / 1e9:12,.1f} GFLOP/s")
        return rate

    vector = _vector_flops_per_second(m, effort)
    say(f"elementwise float32       {vector / 1e9:12,.1f} GFLOP/s")
    return replace(
        known,
        bfloat16_flops_per_second=matmul("bfloat16", jnp.bfloat16, "default"),
        float32_flops_per_second=matmul("float32", jnp.float32, "default"),
        exact_float32_flops_per_second=matmul("float32 highest", jnp.float32, "highest"),
        vector_flops_per_second=vector,
    )


def _matmul_flops_per_second(m: Mesh, dtype: Any, precision: str, effort: Effort) -> float:
    def seconds(size: int) -> float:
        return _step_seconds(m, lambda x: jnp.matmul(x, x, precision=precision), (size, size), dtype, effort)

    return _rate(lambda size: 2 * size**3, seconds, effort.matmul_size, (2, 4), effort)


def _vector_flops_per_second(m: Mesh, effort: Effort) -> float:
    def polynomial(x: jax.Array) -> jax.Array:
        value = x
        for _ in range(POLYNOMIAL):  # one fused loop of multiplies and adds
            value = value * x + 0.5
        return value

    def seconds(elements: int) -> float:
        return _step_seconds(m, polynomial, (elements,), jnp.float32, effort)

    return _rate(lambda elements: 2 * POLYNOMIAL * elements, seconds, effort.vector_elements, (4, 5), effort)


def _copy_bytes_per_second(m: Mesh, effort: Effort, say: Say) -> float:
    def seconds(num_bytes: int) -> float:
        return _step_seconds(m, lambda x: x + 1.0, (num_bytes // 4,), jnp.float32, effort)

    rate = _rate(lambda num_bytes: 2 * num_bytes, seconds, effort.copy_bytes, (4, 4), effort)
    say(f"memory                    {rate / 1e9:12,.1f} GB/s")
    return rate


def _rate(
    amount: Callable[[int], float],
    seconds: Callable[[int], float],
    size: int,
    growth: tuple[int, int],
    effort: Effort,
) -> float:
    """Amount per second, at a size that grows by a factor, some times at most, until a step takes long enough."""
    factor, times = growth
    most = factor**times * size
    while (taken := seconds(size)) < effort.least_seconds and size < most:
        size *= factor
    return amount(size) / taken


def _op_seconds(m: Mesh, effort: Effort, say: Say) -> float:
    """The overhead per op, by sorts of 8 numbers, which XLA does not fuse."""
    num_ops = 64

    def chain(x: jax.Array) -> jax.Array:
        for _ in range(num_ops):
            x = jax.lax.optimization_barrier(jax.lax.sort(x))
        return x

    seconds = _step_seconds(m, chain, (8,), jnp.float32, effort) / num_ops
    say(f"an op                     {seconds * 1e6:12,.2f} us")
    return seconds


def _collectives(m: Mesh, known: Chip, effort: Effort, say: Say) -> Iterator[MeasuredCollective]:
    """Each kind over each axis, except axes that span several levels of links."""
    on = topology(m, known)
    names = [str(name) for name, size in m.shape.items() if size > 1]
    groups = [(name,) for name in names] + ([tuple(names)] if len(names) > 1 else [])
    seen: set[Level] = set()
    for axes in groups:
        levels = on.levels(axes)
        if len(levels) != 1 or levels[0] in seen:
            continue
        seen.add(levels[0])
        for kind in KINDS:
            one = _collective(m, kind, axes, on.group_size(axes), levels[0], effort)
            yield one
            say(
                f"{kind:<18} of {one.num_devices:>4} {one.bytes_per_second / 1e9:12,.1f} GB/s "
                f"{one.start_seconds * 1e6:12,.1f} us"
            )


def _collective(
    m: Mesh, kind: Kind, axes: tuple[str, ...], num_devices: int, level: Level, effort: Effort
) -> MeasuredCollective:
    points = []
    for message_bytes in effort.message_bytes:
        elements = max(message_bytes // 4 // num_devices, 1) * (1 if kind == "all-gather" else num_devices)
        num_bytes = 4 * elements * (num_devices if kind == "all-gather" else 1)
        seconds = _step_seconds(m, _collective_op(kind, axes, num_devices), (elements,), jnp.float32, effort)
        points.append((wire_bytes(kind, num_bytes, num_devices), seconds))
    start_seconds, bytes_per_second = fitted(points)
    return MeasuredCollective(
        kind=kind,
        link=level[0].link,
        num_devices=num_devices,
        start_seconds=start_seconds,
        bytes_per_second=bytes_per_second,
    )


def _collective_op(kind: Kind, axes: tuple[str, ...], num_devices: int) -> Callable[[jax.Array], jax.Array]:
    """The collective as a function of one device's shard."""
    match kind:
        case "all-gather":
            return lambda x: jax.lax.all_gather(x, axes, tiled=True)
        case "reduce-scatter":
            return lambda x: jax.lax.psum_scatter(x, axes, tiled=True)
        case "all-reduce":
            return lambda x: jax.lax.psum(x, axes)
        case "all-to-all":
            return lambda x: jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
        case "collective-permute":
            ring = [(i, (i + 1) % num_devices) for i in range(num_devices)]
            return lambda x: jax.lax.ppermute(x, axes, ring)


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit seconds = start + bytes / rate to (bytes, seconds) points; returns (start seconds, bytes per second).

    Least squares of the relative errors, so that small messages count as much as large ones; start >= 0, rate > 0.
    """
    num_bytes, seconds = (np.array(column, float) for column in zip(*points, strict=True))
    weighted = np.stack([1 / seconds, num_bytes / seconds], axis=1)
    start, per_byte = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)[0]
    if start < 0:
        start, per_byte = 0.0, float((num_bytes / seconds).sum() / ((num_bytes / seconds) ** 2).sum())
    if per_byte <= 0:  # no message was large enough to show a bandwidth
        start, per_byte = float(seconds.min()), float(seconds.min() / num_bytes.max())
    return float(start), float(1 / per_byte)


def _step_seconds(
    m: Mesh, step: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any, effort: Effort
) -> float:
    """Seconds of a step while all devices run it, from loops with more and fewer iterations.

    One element of each result is written into the next operand, so that iterations can't overlap.
    """
    all_axes = P(tuple(m.axis_names))

    def loop(x: jax.Array, num_steps: jax.Array) -> jax.Array:
        def body(i: Any, x: jax.Array) -> jax.Array:
            result = jax.lax.optimization_barrier(step(x))
            one = result.reshape(-1)[:1].reshape((1,) * x.ndim)
            return jax.lax.dynamic_update_slice(x, one * jnp.asarray(1e-3, x.dtype), (0,) * x.ndim)

        return jax.lax.fori_loop(0, num_steps, body, x)

    program = jax.jit(jax.shard_map(loop, mesh=m, in_specs=(all_axes, P()), out_specs=all_axes, check_vma=False))
    make = partial(jax.random.uniform, shape=(m.size * shape[0], *shape[1:]), dtype=dtype, minval=0.25, maxval=0.75)
    x = jax.jit(make, out_shardings=NamedSharding(m, all_axes))(jax.random.key(0))  # equal numbers multiply faster
    one = _fastest_seconds(program, x, 1, effort.num_repeats)
    num_steps = effort.num_steps
    while True:
        more = _fastest_seconds(program, x, 1 + num_steps, effort.num_repeats) - one
        if more > max(effort.least_calls * one, effort.least_seconds):  # dispatch and its jitter are negligible
            return more / num_steps
        if num_steps > MOST_STEPS:
            return max(more, one) / num_steps  # an upper bound of a very short step
        num_steps *= 4


def _fastest_seconds(program: Callable[..., jax.Array], x: jax.Array, num_steps: int, num_repeats: int) -> float:
    jax.block_until_ready(program(x, num_steps))  # compiles
    seconds = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(x, num_steps))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
