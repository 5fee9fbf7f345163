"""Printing of schedules, and lazy import of the package."""

import subprocess
import sys

from sharding.pipeline import schedules


def test_prints_one_line_per_device():
    assert str(schedules.zb_h1(stages=2, microbatches=2)).splitlines() == [
        "device 0:  F0  F1  I0  W0  I1  W1",
        "device 1:  F0  I0  F1  I1  W0  W1",
    ]
    assert str(schedules.terapipe(stages=1, microbatches=1, slices=2)) == "device 0:  F0  F0.1  B0.1  B0"


def test_is_imported_lazily():
    program = (
        "import sys, sharding; assert 'sharding.pipeline' not in sys.modules;"
        " sharding.pipeline.schedules.gpipe(stages=2, microbatches=2).check(); print('done')"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "done\n"
