"""Chips, their peak rates and links, and described devices: meshes over hardware that is not attached.

In: a description such as `"v5p:4x8x8"`, a chip's name, or a calibration file. Out: `Devices` and the `Chip` they are.

Example:
    >>> from sharding import hardware
    >>> hardware.parse("v5p:4x4x8").num_devices, hardware.parse("h100:16x8").chip.name
    (128, 'h100')
    >>> hardware.arranged("v5p", 64).shape
    (4, 4, 4)
    >>> f"{hardware.chip('h100').memory_bytes / 1e9} GB"
    '80.0 GB'
    >>> print(hardware.recognised("gpu", "NVIDIA H100 80GB HBM3").name)
    h100
    >>> hardware.save(hardware.chip("h100"), "machine.json", how={"date": "2026-01-01"})
    >>> hardware.load("machine.json").name
    'h100'
"""

from .chip import Chip, Link, MeasuredCollective, Platform, Precision, Rates, Wire
from .described_devices import Devices, arranged, parse
from .known_chips import CHIPS, chip, recognised
from .machine_file import load, save

__all__ = [
    "CHIPS",
    "Chip",
    "Devices",
    "Link",
    "MeasuredCollective",
    "Platform",
    "Precision",
    "Rates",
    "Wire",
    "arranged",
    "chip",
    "load",
    "parse",
    "recognised",
    "save",
]
