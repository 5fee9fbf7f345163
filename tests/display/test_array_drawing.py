"""Drawings of sharded arrays: every cut is there, in its axis' colour, and nothing else."""

import math
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

import sharding
from sharding import P, ShardingError
from sharding.display import ArrayPicture, Drawing, axis_colors
from sharding.spec import Dim, Spec, from_partition_spec

SIZES = {"one": 1, "data": 2, "tensor": 4, "seq": 3, "expert": 64}
COLORS = {"data": axis_colors.color(0), "tensor": axis_colors.color(1), "seq": axis_colors.color(2)}


def drawing(*specs, shape=(48, 24, 36)):
    arrays = []
    for k, spec in enumerate(specs):
        own = shape[: max(1, len(spec))]
        found = from_partition_spec(spec, own, SIZES, asked="test")
        arrays.append(ArrayPicture(name=f"a{k}", dtype="float32", shape=own, spec=found))
    return Drawing(arrays=tuple(arrays), sizes=SIZES)


def lines(picture):
    """(colour, thickness) of each line, and whether it is vertical."""
    root = ET.fromstring(picture.svg)
    found = root.findall("{http://www.w3.org/2000/svg}line")
    return [(one.get("stroke"), float(one.get("stroke-width")), one.get("x1") == one.get("x2")) for one in found]


@pytest.mark.parametrize(
    ("spec", "rows", "columns"),
    [
        (P(None, None), {}, {}),
        (P("one", None), {}, {}),
        (P("data", "tensor"), {"data": 1}, {"tensor": 3}),
        (P(("data", "tensor"), "seq"), {"data": 1, "tensor": 6}, {"seq": 2}),
        (P(("tensor", "data", "seq"), None), {"tensor": 3, "data": 4, "seq": 16}, {}),
        (P("tensor"), {}, {"tensor": 3}),
    ],
)
def test_each_axis_cuts_its_dim(spec, rows, columns):
    found = lines(drawing(spec))
    for cuts, is_vertical in ((rows, False), (columns, True)):
        assert {axis: sum(c == COLORS[axis] and v == is_vertical for c, _, v in found) for axis in cuts} == cuts
    assert len(found) == sum(rows.values()) + sum(columns.values())


def test_a_part_of_an_axis_has_the_axis_colour():
    dims = (Dim(axes=(("tensor", 1, 2),)), Dim(axes=("seq", ("tensor", 2, 2))))
    array = ArrayPicture(name="a", dtype="int8", shape=(8, 12), spec=Spec(dims=dims))
    found = lines(Drawing(arrays=(array,), sizes=SIZES))
    assert sorted(found) == sorted(
        [(COLORS["tensor"], 2.5, False)] + [(COLORS["seq"], 2.5, True)] * 2 + [(COLORS["tensor"], 1.75, True)] * 3
    )


def test_major_axes_have_thicker_lines():
    thickness = {color: width for color, width, _ in lines(drawing(P(("data", "tensor"), None)))}
    assert thickness[COLORS["data"]] > thickness[COLORS["tensor"]]


def test_many_parts_are_drawn_abbreviated_and_captioned_in_full():
    picture = drawing(P("expert", None), shape=(6400, 8))
    assert 20 <= len(lines(picture)) <= 40
    assert "per device [100, 8]" in picture.svg and "dim 0: 6400 over expert=64 (8 drawn)" in str(picture)


def test_three_sharded_dims_have_sheets():
    root = ET.fromstring(drawing(P("data", "tensor", "seq")).svg)
    edges = [rect.get("stroke") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert edges.count(COLORS["data"]) == 1  # the second of two sheets
    assert "one of 2 sheets, dim 0: 48 over data=2" in str(drawing(P("data", "tensor", "seq")))


def test_all_further_sharded_dims_are_sheets():
    picture = drawing(P("data", "one", "seq", "tensor", "expert"), shape=(2, 4, 3, 48, 64))
    root = ET.fromstring(picture.svg)
    edges = [rect.get("stroke") for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert [edges.count(COLORS[axis]) for axis in ("data", "seq")] == [1, 2]  # 4 of 6 sheets, in the middle by data
    assert "one of 6 sheets, dim 0: 2 over data=2, dim 2: 3 over seq=3" in str(picture)


def test_the_drawn_dims_are_the_sharded_or_the_longest_ones():
    def dims(shape, spec):
        return ArrayPicture(
            name="", dtype="", shape=shape, spec=from_partition_spec(spec, shape, SIZES, asked="")
        ).dims()

    assert dims((), P()) == ((), None, None)
    assert dims((4,), P()) == ((), None, 0)
    assert dims((8, 2, 16), P()) == ((), 0, 2)
    assert dims((8, 2, 16), P(None, "data")) == ((), 1, 2)
    assert dims((8, 2, 16, 4), P("tensor", "data", None, "seq")) == ((0,), 1, 3)
    assert dims((8, 2, 64, 6), P("tensor", "data", "expert", "seq")) == ((0, 1), 2, 3)


def test_characters():
    assert str(drawing(P("data", "tensor"))) == (
        "a0, float32[48, 24] [data, tensor], per device [24, 6]\n"
        "                       dim 1: 24 over tensor=4\n"
        "                      +------+------+------+------+\n"
        "dim 0: 48 over data=2 |      |      |      |      |\n"
        "                      +------+------+------+------+\n"
        "                      |      |      |      |      |\n"
        "                      +------+------+------+------+\n"
        "\n"
        "mesh data=2, tensor=4, seq=3, expert=64"
    )


def test_rows_of_arrays_wrap_at_the_width_of_a_notebook():
    picture = drawing(*[P("data", "tensor")] * 12)
    width, height = (float(n) for n in re.findall(r'(?:width|height)="(\d+)"', picture.svg)[:2])
    assert width <= 900 and height > 300


def test_names_are_never_markup(tmp_path):
    array = ArrayPicture(name="<b>&", dtype="float32", shape=(4,), spec=from_partition_spec(P(), (4,), {}, asked=""))
    picture = Drawing(arrays=(array,), sizes={})
    assert "<b>" not in picture._repr_html_() and picture._repr_svg_() == picture.svg
    picture.save(tmp_path / "a.svg")
    ET.parse(tmp_path / "a.svg")
    assert str(picture).endswith("mesh of one device")


def test_colours_are_distinct_on_both_grounds():
    for is_dark in (False, True):
        colors = [axis_colors.color(k, is_dark=is_dark) for k in range(16)]
        points = [tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in colors]
        assert min(math.dist(a, b) for i, a in enumerate(points) for b in points[:i]) > 45


def test_draw_of_a_completion():
    def loss(params, x):
        hidden = [sharding.annotate(jnp.tanh(x @ p["w"]), name="hidden") for p in params]
        return sum(h.sum() for h in hidden)

    w, x = jax.ShapeDtypeStruct((16, 32), jnp.float32), jax.ShapeDtypeStruct((6, 16), jnp.float32)
    with sharding.mesh(data=2, tensor=4, pipe=1):
        c = sharding.jit(loss, in_shardings=([{"w": P(None, "tensor")}] * 2, P("data"))).complete([{"w": w}] * 2, x)
    picture = c.draw("x", "params/0/w", "hidden")
    assert [a.name for a in picture.arrays] == ["x", "params/0/w", "hidden"]
    assert [str(a.spec) for a in picture.arrays] == ["[data, -]", "[-, tensor]", "[data, tensor]"]
    assert [a.name for a in c.draw().arrays] == ["params/0/w", "x", "hidden#0"]  # equal layers once, no scalars
    assert "pipe" not in picture.svg + str(picture)
    with pytest.raises(ShardingError, match="the value 'hiden'"):
        c.draw("hiden")
