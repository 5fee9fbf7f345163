"""Fully sharded data parallelism with recomputation and scanned layers: every collective as three compilers emit it."""

import itertools

import jax
import pytest
from support.compilers import COMPILERS, devices
from support.train_steps import decoders

import sharding
from sharding import cost
from sharding.mesh import tracing_context
from sharding.spec import sizes_text

MESHES = (
    {"data": 2, "fsdp": 4},
    {"fsdp": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 2, "fsdp": 2, "model": 2},
    {"pod": 2, "fsdp": 2, "model": 2},
    {"pod": 1, "data": 2, "fsdp": 2, "model": 2},
    {"pod": 2, "data": 2, "fsdp": 2, "model": 1},
)
DATA, ALL = ("pod", "data"), ("pod", "data", "fsdp")
"""Axes of the batch: hybrid sharded, or fully."""

LLAMA = itertools.product([False, True], decoders.REMATS, [ALL, DATA], ["layers", "embedding"])
PROGRAMS = [
    *((decoders.llama_step, dict(zip(("scan", "remat", "rows", "constrained"), row, strict=True))) for row in LLAMA),
    *(
        (decoders.gpt_step, {"scan": scan, "remat": remat, "rows": rows})
        for scan, remat, rows in itertools.product([False, True], ["stored", "attention saved"], [ALL, DATA])
    ),
]
CASES = list(itertools.product(MESHES, PROGRAMS))[::7]
"""A seventh of all combinations, in which every mesh and program occurs."""


def name(case):
    sizes, (make, options) = case
    return f"{sizes_text(sizes)}; {make.__name__}; {', '.join(map(str, options.values()))}"


def check(case, backend, described=""):
    sizes, (make, options) = case
    with sharding.mesh(sizes, devices=devices(described)), jax.numpy_rank_promotion("allow"):
        with tracing_context():
            step = make(sizes, weights="fsdp" if "fsdp" in sizes else "data", **options)
        jitted = sharding.jit(step.run, in_shardings=step.specs, donate_argnums=0)
        predicted = jitted.complete(*step.args).communication().lowered(backend).by_kind()
        assert predicted == cost.read_compiled(jitted.lower(*step.args).compile()).by_kind()
        assert sum(count for count, _ in predicted.values()) > 10


@pytest.mark.parametrize("scan", [False, True])
def test_recomputed_layers(scan):
    options = {"scan": scan, "remat": "remat", "rows": ALL, "layers": 1 + scan}
    check(({"data": 2, "fsdp": 2, "model": 2}, (decoders.llama_step, options)), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "described"), COMPILERS.values())
@pytest.mark.parametrize("case", CASES, ids=name)
def test_as_compiled(case, backend, described):
    check(case, backend, described)


def test_every_mesh_and_program_occurs():
    assert [sizes for sizes in MESHES if sizes not in [case[0] for case in CASES]] == []
    assert [program for program in PROGRAMS if program not in [case[1] for case in CASES]] == []
