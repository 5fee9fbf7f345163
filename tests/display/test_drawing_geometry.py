"""Where arrays, their cuts, sheets and captions are drawn."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from sharding import P
from sharding.display import ArrayPicture, Drawing
from sharding.display.array_drawing import GAP, LINE, MAX_CELLS, MAX_SHEETS, MAX_WIDTH, SHEET, _pixels
from sharding.spec import from_partition_spec

SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"data": 2, "tensor": 4, "seq": 3, "expert": 64}


def picture(shape: tuple[int, ...], spec: P, name: str = "a") -> ArrayPicture:
    return ArrayPicture(
        name=name, dtype="int8", shape=shape, spec=from_partition_spec(spec, shape, SIZES, asked="test")
    )


def drawn(*arrays: ArrayPicture, sizes: dict[str, int] | None = None) -> ET.Element:
    return ET.fromstring(Drawing(arrays=arrays, sizes=SIZES if sizes is None else sizes).svg)


def boxes(root: ET.Element) -> list[tuple[float, float, float, float]]:
    """Left, top, width and height of the rectangles of arrays and their sheets."""
    found = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke")]
    return [tuple(float(rect.get(key)) for key in ("x", "y", "width", "height")) for rect in found]


def test_longer_dims_are_longer():
    lengths = [1, 2, 3, 4, 8, 100, 1000, 10**6, 10**9]
    sides = [_pixels(n) for n in lengths]
    assert sides == sorted(sides) and sides[0] == 18 and sides[-1] == 150
    assert _pixels(8) == 42 and len(set(sides)) > 5
    ((_, _, width, height),) = boxes(drawn(picture((8, 64), P())))
    assert (width, height) == (_pixels(64), _pixels(8))


@pytest.mark.parametrize(
    ("spec", "rows", "columns"),
    [
        (P("seq", "data"), [1 / 3, 2 / 3], [1 / 2]),
        (P(("data", "seq"), None), [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], []),
        (P(None, "tensor"), [], [1 / 4, 2 / 4, 3 / 4]),
    ],
    ids=str,
)
def test_cuts_are_where_shards_end(spec: P, rows: list[float], columns: list[float]):
    root = drawn(picture((12, 24), spec))
    ((left, top, width, height),) = boxes(root)
    found: dict[bool, list[float]] = {True: [], False: []}
    for line in root.iter(f"{SVG}line"):
        x1, y1, x2, y2 = (float(line.get(key)) for key in ("x1", "y1", "x2", "y2"))
        is_column = x1 == x2
        across = (y1 - top, y2 - top, height) if is_column else (x1 - left, x2 - left, width)
        assert across[0] == pytest.approx(0, abs=0.1) and across[1] == pytest.approx(across[2], abs=0.1)
        found[is_column].append((x1 - left) / width if is_column else (y1 - top) / height)
    assert sorted(found[False]) == pytest.approx(rows, abs=0.01)
    assert sorted(found[True]) == pytest.approx(columns, abs=0.01)


def test_lines_of_major_axes_are_on_top_of_minor_ones():
    root = drawn(picture((12, 24), P(("data", "seq"), None)))
    thickness = [float(line.get("stroke-width")) for line in root.iter(f"{SVG}line")]
    assert thickness == sorted(thickness) and thickness.count(2.5) == 1 and thickness.count(1.75) == 4


@pytest.mark.parametrize(("axis", "num"), [("data", 2), ("seq", 3), ("tensor", 4), ("expert", MAX_SHEETS)])
def test_sheets_lie_behind_each_other(axis: str, num: int):
    others = [name for name in SIZES if name not in (axis, "expert")][:2]
    found = boxes(drawn(picture((192, 192, 192), P(axis, *others))))
    assert len(found) == num
    front = found[-1]
    for k, box in enumerate(reversed(found)):
        assert box == (front[0] + k * SHEET, front[1] + k * SHEET, front[2], front[3])


def test_arrays_do_not_overlap_and_wrap_at_the_width():
    for num in (1, 5, 12):
        root = drawn(*[picture((64, 256), P("data", "tensor"), f"array{k}") for k in range(num)])
        found = boxes(root)
        assert len(found) == num and all(left + width <= MAX_WIDTH for left, _, width, _ in found)
        for a, b in itertools.combinations(found, 2):
            assert a[0] + a[2] < b[0] or b[0] + b[2] < a[0] or a[1] + a[3] < b[1] or b[1] + b[3] < a[1]
        width, height = (float(root.get(key)) for key in ("width", "height"))
        assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
        texts = [(float(text.get("x")), float(text.get("y"))) for text in root.iter(f"{SVG}text")]
        assert all(0 <= x < width and 0 <= y < height for x, y in texts)
        assert all(x + w < width and y + h < height for x, y, w, h in found)
        rows = sorted({top for _, top, _, _ in found})
        (high,) = {box[3] for box in found}
        assert all(b - a == 3 * LINE + high + GAP for a, b in itertools.pairwise(rows))
    assert len(rows) > 1


def test_captions_are_three_lines_above_the_array():
    root = drawn(picture((64, 256), P("data")), sizes={"data": 2})
    ((left, top, _, _),) = boxes(root)
    texts = list(root.iter(f"{SVG}text"))
    caption, legend = texts[:3], texts[3:]
    heights = [float(text.get("y")) for text in caption]
    assert all(b - a == pytest.approx(LINE) for a, b in itertools.pairwise(heights)) and heights[-1] < top
    assert {text.get("x") for text in caption} == {f"{left:g}"}
    assert [text.get("font-weight") for text in caption] == ["bold", None, None]
    assert [text.text for text in caption] == ["a", "int8[64, 256] [data, -]", "per device [32, 256]"]
    assert [text.text for text in legend] == ["data=2"]


@pytest.mark.parametrize("num", [2, MAX_CELLS, MAX_CELLS + 1, 64])
def test_cells_in_characters(num: int):
    found = from_partition_spec(P("x", "y"), (num * 2, 4), {"x": num, "y": 2}, asked="test")
    array = ArrayPicture(name="a", dtype="int8", shape=(num * 2, 4), spec=found)
    lines = str(Drawing(arrays=(array,), sizes={"x": num, "y": 2})).splitlines()
    rules = [line for line in lines if "+--" in line]
    assert len(rules) == min(num, MAX_CELLS) + 1 and {line.count("+") for line in rules} == {3}
    assert len({line.index("+") for line in rules}) == 1
    cells = [line for line in lines if "|" in line]
    assert {line.index("|") for line in cells} == {rules[0].index("+")} and len(cells) == len(rules) - 1
    assert [f"dim 0: {num * 2} over x={num}" in line for line in cells] == [True] + [False] * (len(cells) - 1)
    assert (f"({MAX_CELLS} drawn)" in cells[0]) == (num > MAX_CELLS)


def test_the_names_of_arrays_are_bold_and_nothing_else():
    texts = drawn(picture((8, 64), P("data"), "first"), picture((6,), P(), "second")).iter(f"{SVG}text")
    bold = [text.text for text in texts if text.get("font-weight") == "bold"]
    assert [text.split(",")[0] for text in bold] == ["first", "second"]


@pytest.mark.parametrize("shape", [(), (8,), (8, 64), (6, 4, 8)])
def test_captions_end_above_their_array_and_below_the_previous_row(shape):
    root = drawn(*[picture(shape, P())] * 12)
    tops = sorted({top for _, top, _, _ in boxes(root)})
    bottoms = sorted({top + height for _, top, _, height in boxes(root)})
    baselines = sorted({float(text.get("y")) for text in root.iter(f"{SVG}text")})
    assert len(tops) > 1
    for k, top in enumerate(tops):
        own = [y for y in baselines if (bottoms[k - 1] if k else 0) < y < top]
        assert len(own) == 3 and top - own[-1] >= LINE / 2  # below the letters of the last line
        assert own[0] - LINE / 2 >= (bottoms[k - 1] if k else 0)
