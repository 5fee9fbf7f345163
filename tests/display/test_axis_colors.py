"""The colours of mesh axes."""

import re

import pytest

from sharding.display import axis_colors


def lightness(color):
    return sum(int(color[i : i + 2], 16) for i in (1, 3, 5)) / 3


@pytest.mark.parametrize("is_dark", [False, True])
def test_any_number_of_axes_have_colours_of_their_own(is_dark):
    colors = [axis_colors.color(k, is_dark=is_dark) for k in range(24)]
    assert all(re.fullmatch("#[0-9a-f]{6}", one) for one in colors)
    assert len({*colors}) == 24
    assert colors[:8] == [*(axis_colors.DARK if is_dark else axis_colors.LIGHT)]


def test_colours_on_a_dark_ground_are_lighter():
    for numbers in (range(8), range(8, 24)):
        light, dark = (sum(lightness(axis_colors.color(k, is_dark=on)) for k in numbers) for on in (False, True))
        assert dark > light + 40 * len(numbers)


def test_axes_of_one_device_are_not_drawn():
    assert axis_colors.drawn({"a": 1, "b": 2, "c": 1, "d": 4}) == {"b": 2, "d": 4}
    assert axis_colors.drawn({}) == {}


def test_a_class_per_axis_and_ground():
    light, dark = axis_colors.style_sheet(3).split("@media (prefers-color-scheme: dark)")
    for k in range(3):
        assert f".c{k} {{ --c: {axis_colors.LIGHT[k]}; }}" in light
        assert f".c{k} {{ --c: {axis_colors.DARK[k]}; }}" in dark
    assert ".c3" not in light + dark
