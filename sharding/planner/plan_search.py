"""`sharding.plan`: the search for a mesh and the annotations that make a step fast within a memory limit.

For each mesh the program becomes a problem (`graph_problem.py`), which a solver decides; what it wants is costed as
the completed program is: by the ledger, the memory report and the estimate (`mesh_search.py`). If the peak exceeds the
limit, the problem's own limit falls in proportion. The best meshes get annotations (`plan_annotations.py`), and the
cheapest completion wins, with a few other specs tried for each of its annotations (`plan_polish.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..cost.topology import topology_of_sizes
from ..display.units import bytes_text
from ..errors import ShardingError
from ..explain.memory_report import memory
from ..hardware import Devices, parse
from ..jit.jit import jit
from ..spec import sizes_text
from .algorithms import check_algorithm
from .graph_problem import GraphProblem, of_graph
from .mesh_search import Found, MeshSearch, Version
from .parallel_plan import Plan
from .plan_annotations import score
from .plan_stages import Staged

AXIS_NAMES: tuple[str, ...] = ("x", "y", "z")
"""Of the meshes that are tried, as JAX's documentation names them."""
MOST_MESHES, MOST_STAGED_MESHES = 24, 4
"""Meshes that are tried, at most, and those for each version in stages."""


def plan(
    step: Callable[..., Any],
    *args: Any,
    devices: Devices | str,
    mesh: Mapping[str, int] | None = None,
    algorithm: str = "auto",
    memory_bytes: float | None = None,
    seconds: float = 60,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
    staged: Sequence[Staged] = (),
    **kwargs: Any,
) -> Plan:
    """Finds a mesh and the annotations with which a step is estimated to take least time, before anything compiles.

    Args:
        step: a function, or one made by `sharding.jit`, whose options such as `donate_argnums` hold. What it annotates
            is kept. What blocks under `jax.checkpoint(..., policy=remat.auto)` keep is part of the plan.
        *args: its arguments, or ShapeDtypeStructs.
        devices: to plan for, such as `"v5p:8x8x8"` or `"h100:64x8"`; they need not be attached.
        mesh: axis -> size, major axis first. Default: meshes of up to three axes `x`, `y`, `z` are tried.
        algorithm: a key of `planner.ALGORITHMS`, or "auto".
        memory_bytes: limit on peak memory per device. Default: what the chip offers to programs.
        seconds: after which no other mesh is tried. Ctrl-C ends the search, too; the best plan so far is returned.
        seed: of random decisions.
        on_progress: called with a line of text for each mesh.
        staged: versions of the step in pipeline stages, which are planned for meshes that begin with their axis. The
            plan is of one of them if that is faster, or if `mesh` has their axis.
        **kwargs: keyword arguments of the step.

    Raises:
        ShardingError: unknown devices or algorithm, a mesh of another number of devices, a limit of 0, or no plan fits;
            the message has the smallest peak found, what fills it, and what would lower it.

    Example:
        >>> import jax
        >>> import sharding
        >>> def step(w, x):
        ...     return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
        >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((1 << 20, 256), "float32")
        >>> plan = sharding.plan(step, w, x, devices="h100:1x8")
        >>> dict(plan.axes), dict(plan.annotations)
        ({'x': 8}, {'x': P('x',)})
    """
    asked = f"sharding.plan(..., devices={str(devices)!r}, memory_bytes={memory_bytes})"
    on = parse(devices) if isinstance(devices, str) else devices
    check_algorithm(algorithm)
    limit = _limit(memory_bytes, on, asked)
    if not seconds > 0:
        raise ShardingError(f"sharding.plan(seconds={seconds})", required="a positive number of seconds")
    search = MeshSearch(
        devices=on,
        algorithm=algorithm,
        limit=limit,
        deadline=time.monotonic() + seconds,
        seed=seed,
        on_progress=on_progress or (lambda text: None),
    )
    versions = [Version(step=_jitted(step), args=args, kwargs=kwargs)]
    versions += [Version(step=_jitted(one.step), args=one.args, kwargs={}, stages=one.stages) for one in staged]
    items = [item for version in versions for item in _on_meshes(version, on, mesh)]
    in_stages = [item for item in items if item[0].stages is not None]
    found = _best(search, in_stages if mesh is not None and in_stages else items)
    if found is None:
        raise _nothing_fits(search, asked)
    return found


def _on_meshes(
    version: Version, on: Devices, given: Mapping[str, int] | None
) -> Iterator[tuple[Version, dict[str, int]]]:
    """A version of the step with each mesh to try it on: for stages those that begin with their axis."""
    first = {} if version.stages is None else {version.stages.axis: version.stages.count}
    if given is not None:
        if all(given.get(axis) == size for axis, size in first.items()):
            yield version, dict(given)
    elif on.num_devices % math.prod(first.values()) == 0:
        yield from ((version, axes) for axes in _meshes(on, first))


def _best(search: MeshSearch, items: Sequence[tuple[Version, dict[str, int]]]) -> Plan | None:
    """The best plan over versions and what their blocks under `remat.auto` keep; None if none fits."""
    ends = {id(version): version.ends(axes, search.devices) for version, axes in reversed(items)}
    rounds = [
        [(ends[id(version)][k], axes) for version, axes in items if k < len(ends[id(version)])]
        for k in range(max(map(len, ends.values())))
    ]
    best: Plan | None = None
    deadline = search.deadline
    try:
        for k, these in enumerate(rounds):
            search.deadline = deadline - search.left * (len(rounds) - k - 1) / 2
            found = _run(search, these)
            if not found:
                continue
            plan = search.plan(found)
            if best is None or score(plan.costs) < score(best.costs):
                best = plan
            if search.is_interrupted or math.isinf(found[0].limit):  # nothing has to be given up for memory
                break
    except KeyboardInterrupt:
        if best is None:
            raise
    return best


def _run(search: MeshSearch, items: Sequence[tuple[Version, dict[str, int]]]) -> list[Found]:
    """The best for each mesh, the best one first; versions in stages have half of the time."""
    whole = [item for item in items if item[0].stages is None]
    staged = [item for item in items if item[0].stages is not None]
    found: list[Found] = []
    for these, share in ((whole, 0.5 if staged else 1.0), (staged, 1.0)):
        if these and not search.is_interrupted:
            found += search.run(these, share * search.left)
    return sorted(found, key=lambda one: score(one.costs))


def problem_of(
    step: Callable[..., Any], *args: Any, devices: Devices | str, mesh: Mapping[str, int], **kwargs: Any
) -> GraphProblem:
    """The problem that `sharding.plan` solves for one mesh.

    Args:
        step: as for `sharding.plan`.
        *args: likewise.
        devices: likewise.
        mesh: axis -> size, major axis first.
        **kwargs: keyword arguments of the step.

    Raises:
        ShardingError: unknown devices, or a mesh of another number of them.

    Example:
        >>> import jax
        >>> from sharding import planner
        >>> x = jax.ShapeDtypeStruct((512, 512), "float32")
        >>> of = planner.problem_of(lambda x: x @ x, x, devices="h100:1x8", mesh={"x": 2, "y": 4})
        >>> planner.solve(of.problem).is_proven
        True
    """
    on = parse(devices) if isinstance(devices, str) else devices
    completion, over = Version(step=_jitted(step), args=args, kwargs=kwargs).completed(mesh, on)
    graph = completion.assignment.graph
    return of_graph(graph, over, annotations=graph.annotations, name=f"{completion.name} on {sizes_text(mesh)}")


def _jitted(step: Any) -> Any:
    return step if hasattr(step, "complete") else jit(step)


def _limit(memory_bytes: float | None, on: Devices, asked: str) -> float:
    if memory_bytes is not None and not memory_bytes > 0:
        raise ShardingError(asked, found=f"memory_bytes={memory_bytes}", required="a positive number of bytes")
    own = on.chip.usable_memory_bytes or on.chip.memory_bytes or math.inf
    return float(own if memory_bytes is None else memory_bytes)


def _meshes(on: Devices, first: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes of one to three axes behind some, those with fewer axes first; on a torus those that fold onto it."""
    n, found = on.num_devices // math.prod(first.values()), 0
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    for count in range(1, len(AXIS_NAMES) + 1):
        for sizes in itertools.product(divisors, repeat=count) if n > 1 else [(1,)] * (count == 1):
            axes = {**first, **dict(zip(AXIS_NAMES, sizes, strict=False))}
            folds = math.prod(sizes) == n and topology_of_sizes(axes, on, None).folds
            if folds and found < (MOST_STAGED_MESHES if first else MOST_MESHES):
                found += 1
                yield axes


def _nothing_fits(search: MeshSearch, asked: str) -> ShardingError:
    """What is missing: the smallest peak found, what fills it, and what would lower it."""
    assert search.smallest is not None
    one = search.smallest
    report = memory(one.assignment, donated=one.completion.donated_leaves, platform=search.devices.chip.platform)
    classes = {category: size for category, size in report.by_class.items() if size}
    activations = sum(size for category, size in classes.items() if "activations" in category)
    filled = ", ".join(f"{category} {bytes_text(size)}" for category, size in classes.items())
    return ShardingError(
        asked,
        found=[
            f"{bytes_text(one.costs.peak_bytes)} at the least, on mesh {sizes_text(one.axes)}",
            f"at its peak: {filled}",
        ],
        required=f"a plan within {bytes_text(int(search.limit))} per device",
        fix=[
            f"memory_bytes={one.costs.peak_bytes}",
            *(["jax.checkpoint(layer, policy=remat.auto) around each layer"] if activations > search.limit / 4 else []),
            "more devices",
            "a smaller batch",
        ],
    )
