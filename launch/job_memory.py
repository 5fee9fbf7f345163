"""The memory of a whole training job: each phase's device peak and host bytes, before anything compiles.

Every phase runs a program of `JittedWorkload`, whose memory is predicted as that of the train step is. Beside it the
devices hold what the training loop keeps: the state, and batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import sharding
from sharding.checkpoint.array_names import stored_shape
from sharding.checkpoint.corruption import checksum
from sharding.display import Column, Table, Tabular
from sharding.display.units import bytes_text
from sharding.explain import Fit, MemoryReport
from sharding.explain.memory_fit import fit
from sharding.hardware import Platform
from sharding.mesh import described, platform
from sharding.spec import sizes_text

from .jitted_workload import JittedWorkload, abstract_key
from .workload import Shapes

COLUMNS = (
    Column("phase"),
    Column("device peak", "bytes"),
    Column("held", "bytes"),
    Column("results", "bytes"),
    Column("temporaries", "bytes"),
    Column("host, per process", "bytes"),
    Column("fits"),
)
RESTORED_COPIES = 3
"""Of the largest array, which a restore has at most in the host's memory beside the process's shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a job: its program, and what is in memory beside it."""

    name: str
    report: MemoryReport
    """Of the phase's program; of the array whose checksum takes most, where there is one program per array."""
    held_bytes: int
    """Per device: arrays that are there before the program runs, its arguments among them."""
    host_bytes: int
    """Per process, at most: in the host's memory beside the memory of its devices."""

    @property
    def peak_bytes(self) -> int:
        """Per device: what is held, and the program's results and temporaries."""
        return self.held_bytes + self.report.result_bytes + self.report.temporary_bytes

    def fits(self, chip: str) -> Fit:
        """Whether the peak fits a chip."""
        error, outside = self.report.peak_error, self.report.collective_buffer_bytes
        # What is held is known exactly; what a program adds is not.
        own = self.report.peak_bytes
        low, high = (self.peak_bytes + int(own * (factor - 1)) for factor in (error.low, error.high))
        return fit(self.peak_bytes, chip, range_bytes=(low, high), outside_bytes=outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory(Tabular):
    """The memory of every phase of a job; prints as a table."""

    mesh: tuple[tuple[str, int], ...]
    platform: Platform
    num_local_devices: int
    """Devices of one process."""
    phases: tuple[Phase, ...]
    """In the order of a run."""
    uncounted: tuple[str, ...]
    """What is not counted."""
    chip: str | None = None
    """The chip to fit, if it is known."""
    budget_bytes: int | None = None
    """A limit per device."""

    @property
    def highest(self) -> Phase:
        """The phase with the highest device peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits the chip and the budget; None without either."""
        found = [self._fits(phase) for phase in self.phases]
        return None if None in found else all(found)

    def tables(self) -> list[Table]:
        """The phases."""
        words = {None: "", True: "yes", False: "no"}
        rows = [
            (
                phase.name,
                phase.peak_bytes,
                phase.held_bytes,
                phase.report.result_bytes,
                phase.report.temporary_bytes,
                phase.host_bytes,
                words[self._fits(phase)],
            )
            for phase in self.phases
        ]
        title = f"memory of the job on mesh {sizes_text(dict(self.mesh))}"
        shown = COLUMNS if self.fits is not None else COLUMNS[:-1]
        return [Table(title, shown, [row[: len(shown)] for row in rows])]

    def _fits(self, phase: Phase) -> bool | None:
        limits = [] if self.chip is None else [bool(phase.fits(self.chip))]
        limits += [] if self.budget_bytes is None else [phase.peak_bytes <= self.budget_bytes]
        return all(limits) if limits else None

    def notes(self) -> list[str]:
        """Whether the highest phase fits, what the columns mean, and what is not counted."""
        highest, found = self.highest, []
        if self.chip is not None:
            found.append(f"{highest.name}: {highest.fits(self.chip)}")
        if self.budget_bytes is not None:
            verb = "fits" if highest.peak_bytes <= self.budget_bytes else "does not fit"
            found.append(f"{highest.name}: {verb} the budget of {bytes_text(self.budget_bytes)} per device")
        devices = f"{self.num_local_devices} device{'s' * (self.num_local_devices > 1)} per process"
        found.append(f"held: state, batches and arguments; host: at most, with {devices}, beside the devices' memory")
        if self.platform == "cpu":
            found.append("CPU devices have their memory in the host's: add that of all devices of a process")
        return [*found, *(f"not counted: {one}" for one in self.uncounted)]

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    __repr__ = __str__


def job_memory(
    jitted: JittedWorkload, *, batch_size: int, chip: str | None = None, budget_bytes: int | None = None
) -> JobMemory:
    """The memory of the job that trains `jitted`, whose mesh must be the mesh in context.

    Args:
        jitted: the functions that a run calls.
        batch_size: of training and evaluation.
        chip: to fit.
        budget_bytes: a limit per device.
    """
    mesh = jitted.mesh
    return JobMemory(
        mesh=tuple(mesh.shape.items()),
        platform=platform(mesh),
        num_local_devices=_num_local_devices(mesh),
        phases=tuple(_phases(jitted, batch_size)),
        uncounted=tuple(_uncounted(jitted)),
        chip=chip,
        budget_bytes=budget_bytes,
    )


def _phases(jitted: JittedWorkload, batch_size: int) -> Iterator[Phase]:
    state, key = jitted.abstract_state(), abstract_key()
    batch = jitted.placed(jitted.workload.batch_shapes(batch_size))
    state_bytes, batch_bytes, key_bytes = (_device_bytes(each) for each in (state, batch, key))
    local, on_host = _num_local_devices(jitted.mesh), _host_bytes(state)

    def phase(name: str, report: MemoryReport, held_bytes: int, host_bytes: int) -> Phase:
        """Host bytes: per process, beside what state and program have there."""
        added = report.host.total_bytes - report.host.argument_bytes
        return Phase(name=name, report=report, held_bytes=held_bytes, host_bytes=host_bytes + local * (on_host + added))

    init = jitted.init.complete(key).memory()
    # Its results are the state, which is not there before.
    yield Phase(
        name="initialization",
        report=init,
        held_bytes=key_bytes,
        host_bytes=local * init.host.total_bytes,
    )
    read_bytes = _process_bytes(batch, local)
    # The next batch is read and placed while a step computes, and both are there until the next step.
    yield phase("training step", jitted.completion.memory(), state_bytes + 2 * batch_bytes, read_bytes)
    scored = jitted.evaluate.complete(state.params, state.variables, batch).memory()
    yield phase("evaluation", scored, state_bytes + 3 * batch_bytes, read_bytes)
    saved, largest = _checksums(state), max(_process_bytes(leaf, local) for leaf in jax.tree.leaves(state))
    # Arrays of CPU devices are in the host's memory already.
    copied = 0 if platform(jitted.mesh) == "cpu" else local * (state_bytes + on_host)
    yield phase("checkpoint save", saved, state_bytes + 2 * batch_bytes, copied + largest)
    yield phase("checkpoint restore", saved, state_bytes, copied + RESTORED_COPIES * largest)
    if jitted.generate is not None and jitted.workload.sampler is not None:
        prompts = np.tile(jitted.workload.sampler.prompt, (jitted.num_batch_shards, 1))
        prompts = jitted.placed(jax.ShapeDtypeStruct(prompts.shape, prompts.dtype))
        sampled = jitted.generate.complete(state.params, prompts, key).memory()
        held = state_bytes + _device_bytes(prompts) + key_bytes
        yield phase("sampling", sampled, held, _process_bytes(prompts, local))


def _checksums(state: Shapes) -> MemoryReport:
    """The memory of the checksum that takes most; one program per array runs, one after the other."""
    arrays = [stored_shape(leaf) for leaf in jax.tree.leaves(state)]
    different = {(x.shape, x.dtype, x.sharding): x for x in arrays}.values()
    reports = [sharding.jit(checksum).complete(x).memory() for x in different]
    return max(reports, key=lambda report: report.result_bytes + report.temporary_bytes)


def _uncounted(jitted: JittedWorkload) -> Iterator[str]:
    yield "the data on the host, beside one batch"
    yield "the search for the origin of a non-finite loss, which runs op by op and keeps every value"
    step = jitted.workload.mpmd_step
    if step is not None and step.suits(jitted.mesh):
        yield "the pipeline's programs: this run has several (MPMD) in place of the train step's one"


def _lines(job: JobMemory) -> Iterator[str]:
    (table,) = job.tables()
    highest = job.highest
    yield f"{table.title}: highest in the phase {highest.name}, {bytes_text(highest.peak_bytes)} per device"
    yield from table.lines()
    yield from job.notes()


def _num_local_devices(mesh: Any) -> int:
    """Devices of one process; all of them where no hosts are described."""
    if isinstance(mesh, Mesh):
        first = mesh.devices.flat[0].process_index
        return sum(device.process_index == first for device in mesh.devices.flat)
    known = described()
    return mesh.size if known is None else known.devices_per_host


def _leaf_bytes(leaf: Any) -> tuple[int, int]:
    """Bytes of an abstract array, and of one device's shard of it."""
    held = stored_shape(leaf)
    shape = held.shape if held.sharding is None else held.sharding.shard_shape(held.shape)
    return tuple(int(np.prod(dims)) * held.dtype.itemsize for dims in (held.shape, shape))


def _is_on_host(leaf: Any) -> bool:
    return getattr(leaf.sharding, "memory_kind", None) not in (None, "device")


def _device_bytes(tree: Shapes) -> int:
    """Bytes per device of the arrays in device memory."""
    return sum(_leaf_bytes(leaf)[1] for leaf in jax.tree.leaves(tree) if not _is_on_host(leaf))


def _host_bytes(tree: Shapes) -> int:
    """Bytes per device of the arrays in the host's memory."""
    return sum(_leaf_bytes(leaf)[1] for leaf in jax.tree.leaves(tree) if _is_on_host(leaf))


def _process_bytes(tree: Shapes, num_local: int) -> int:
    """Bytes of what a process has of arrays, at most."""
    return sum(min(full, num_local * shard) for full, shard in map(_leaf_bytes, jax.tree.leaves(tree)))
