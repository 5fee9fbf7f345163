"""What the package says of itself holds, and how a schedule prints."""

import doctest
import importlib
import subprocess
import sys

import pytest

from sharding.pipeline import schedules


@pytest.mark.parametrize("name", ["sharding.pipeline", "sharding.pipeline.schedule"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_prints_a_line_per_device():
    assert str(schedules.zb_h1(stages=2, microbatches=2)).splitlines() == [
        "device 0:  F0  F1  I0  W0  I1  W1",
        "device 1:  F0  I0  F1  I1  W0  W1",
    ]
    assert str(schedules.terapipe(stages=1, microbatches=1, slices=2)) == "device 0:  F0  F0.1  B0.1  B0"


def test_comes_when_it_is_touched():
    program = (
        "import sys, sharding; assert 'sharding.pipeline' not in sys.modules;"
        " sharding.pipeline.schedules.gpipe(stages=2, microbatches=2).check(); print('done')"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "done\n"
