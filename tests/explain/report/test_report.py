"""The report: its data, its safety as one self-contained file, and its use by pointer and by keyboard."""

import dataclasses
import html
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support import browser

import sharding
from sharding import P, ShardingError
from sharding.display import Column, Table
from sharding.explain import report
from sharding.launch import workloads
from sharding.launch.config.model_config import ModelOptions
from sharding.launch.config.optimizer_config import Optimization
from sharding.models import layouts

EVIL = "</script><b>\u2028"
NUM_LAYERS = 4


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"layers": [{"w1": floats(16, 64), "w2": floats(64, 16)}] * NUM_LAYERS, "bias": floats(7)}
X = floats(32, 16)


def loss(params, x):
    for k, layer in enumerate(params["layers"]):
        with jax.named_scope("mlp"):
            w1 = sharding.annotate(layer["w1"], P(None, "tensor"))
            x = sharding.annotate(jnp.tanh(x @ w1) @ layer["w2"], name=EVIL if k == 0 else "hidden")
    x = sharding.barrier(x, "forward")
    return jnp.mean(jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0] ** 2) + jnp.sum(params["bias"])


def train_step(params, x):
    value, gradients = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


def completed(devices="h100:1x8"):
    specs = ({"layers": None, "bias": P(None)}, P("data", None))
    with sharding.mesh({"data": 2, "tensor": 4}, devices=devices):
        return sharding.jit(train_step, in_shardings=specs, donate_argnums=0).complete(PARAMS, X)


@pytest.fixture(scope="module")
def c():
    return completed()


@pytest.fixture(scope="module")
def path(c, tmp_path_factory):
    return c.report(tmp_path_factory.mktemp("report") / "report.html")


def read(text):
    """The data of a page, by the rules of HTML: a script ends at the first `</script`."""
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script', text, re.DOTALL)
    return json.loads(data)


@pytest.fixture(scope="module")
def data(path):
    return read(path.read_text(encoding="utf-8"))


class Links:
    """The chains of axes, from the columns of the data."""

    def __init__(self, data):
        self.data, self.at = data, {}
        keys = [
            (v, d, a) for v, spec in enumerate(data["spec"]) for d, axes in enumerate(data["specs"][spec]) for a in axes
        ]
        self.at = {key: k for k, key in enumerate(keys)}
        assert len(keys) == len(data["step"]) == len(data["link"])

    def chain(self, v, d, a):
        while (v, d, a) in self.at:
            k = self.at[v, d, a]
            word, source, array, back = self.data["steps"][self.data["step"][k]]
            yield v, d, *(self.data["strings"][n] for n in (word, source, array))
            if back < 0:
                return
            v, d = v - self.data["link"][k], back


def test_links_give_the_chain_of_every_axis(c, data):
    links, axes = Links(data), {text: k for k, (text, _, _) in enumerate(data["axes"])}
    for v, d, axis in c.assignment.reasons:
        steps = [(u, e, r.word, r.source, r.array) for u, e, r in c.assignment.chain(v, d, axis)]
        assert list(links.chain(v, d, axes[axis])) == steps


def test_values_are_those_of_the_program(c, data):
    graph = c.assignment.graph
    assert len(data["type"]) == len(graph.shapes)
    for v, (kind, spec) in enumerate(zip(data["type"], data["spec"], strict=True)):
        dtype, itemsize, shape = data["types"][kind]
        assert (dtype, itemsize, tuple(shape)) == (str(graph.dtypes[v]), graph.itemsize(v), graph.shapes[v])
        written = [[data["axes"][a][0] for a in axes] for axes in data["specs"][spec]]
        assert written == [list(axes) for axes in c.assignment.specs[v].axes]
    names = {name: v for kind in ("arguments", "results", "named") for name, v in data[kind]}
    assert names == graph.names
    assert {data["strings"][scope] for _, _, scope, _ in data["origins"]} >= {"mlp", ""}


def test_replicated_dims_have_the_reasons_of_why(c, data):
    reasons = {(v, d): data["strings"][n] for v, d, n in data["replicated"]}
    lines = []
    for name, v in c.assignment.graph.names.items():
        for d, dim in enumerate(c.assignment.specs[v].dims):
            if not dim.axes:
                (line,) = c.why(name, d)
                reason = reasons.get((v, d), "not reached by any annotation")
                assert line == f"{name} dim {d} is replicated: {reason}"
                lines.append(line)
    assert any("closed by" in line for line in lines)


@pytest.mark.parametrize("layers, name", [(range(NUM_LAYERS), "*"), ([2], "2")], ids=["all", "one"])
def test_a_cause_names_the_layer_where_only_one_has_it(layers, name, tmp_path):
    specs = {
        "layers": [{"w1": None, "w2": P("data") if k in layers else None} for k in range(NUM_LAYERS)],
        "bias": None,
    }
    with sharding.mesh({"data": 2, "tensor": 4}, devices="h100:1x8"):
        c = sharding.jit(train_step, in_shardings=(specs, P("data"))).complete(PARAMS, X)
    rows = read(c.report(tmp_path / "report.html").read_text(encoding="utf-8"))["collectives"]
    (row,) = (row for row in rows if row[7].startswith("operand 1 of dot_general"))
    assert row[-1] == len(layers) and f", params/layers/{name}/w2, " in row[7] and f"params/layers/{name}/w2" in row[8]


def test_costs_match_ledger_memory_report_and_estimate(c, data):
    ledger, memory, estimate = c.communication(), c.memory(), c.estimate()
    assert sum(row[2] for row in data["collectives"]) == sum(x.count for x in ledger)
    assert sum(row[3] for row in data["collectives"]) == ledger.total_bytes
    assert sum(row[4] for row in data["collectives"]) == ledger.total_wire_bytes
    assert sum(row[5] for row in data["collectives"]) == pytest.approx(estimate.communication_seconds)
    assert data["memory"]["peak"] == memory.peak_bytes
    assert data["time"]["seconds"] == estimate.seconds
    assert sum(row[1] for row in data["time"]["by_source"]) == pytest.approx(estimate.compute_seconds)
    assert (data["time"]["mfu"], data["time"]["bound"]) == (pytest.approx(estimate.mfu, abs=1e-4), estimate.bound_text)


def test_a_page_is_self_contained_and_safe(path):
    text = path.read_text(encoding="utf-8")
    assert EVIL not in text and "\u2028" not in text
    assert text.count("</script") == text.count("<script") == 2
    assert not re.search(r"""\b(src|href)=["'](?!#|data:)|@import|url\(|fetch\(|XMLHttp""", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>]*", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    assert "default-src 'none'" in text


def test_a_page_is_small(c, data):
    assert len(json.dumps(data, separators=(",", ":"))) < 12_000
    costs = report.contents(c.assignment, name="f", with_costs=False)
    assert costs["memory"] is None and costs["time"] is None and not costs["slow"]


def test_a_slow_compilation_is_on_the_page():
    def deep(x):
        for _ in range(600):
            x = jax.numpy.tanh(x @ x) + 1
        return x

    with sharding.mesh(data=8):
        c = sharding.jit(deep).complete(jax.ShapeDtypeStruct((8, 8), "float32"))
    slow = report.contents(c.assignment, name="deep", with_costs=False)["slow"]
    assert slow[0].startswith("compiles in tens of seconds on cpu")
    assert slow[1].startswith("600 equal layers at test_report.py")


def test_layers_add_few_bytes_per_value():
    def stack(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    def size(n):
        with sharding.mesh({"data": 2}, devices=2):
            c = sharding.jit(stack, in_shardings=(None, P("data"))).complete([floats(16, 16)] * n, X)
        return len(report.page(report.contents(c.assignment, name="f"))), len(c.assignment.specs)

    (few_bytes, few), (many_bytes, many) = size(10), size(200)
    assert many_bytes - few_bytes < 60 * (many - few)


def test_unknown_devices_omit_times(tmp_path):
    c = completed(devices=8)
    assert read(c.report(tmp_path / "a.html").read_text(encoding="utf-8"))["time"] is None
    found = read(c.report(tmp_path / "a.html", hardware="v5p").read_text(encoding="utf-8"))
    assert found["time"]["seconds"] == c.estimate("v5p").seconds
    assert found["devices"].startswith("v5p:")
    with pytest.raises(ShardingError, match="no built-in chip 'v5q'"):
        c.report(tmp_path / "a.html", hardware="v5q")


def test_devices_are_remembered_outside_the_mesh(c):
    assert c.estimate().seconds == c.estimate("h100:1x8").seconds


def test_a_notebook_shows_the_same_page_in_an_iframe(c):
    framed = c._repr_html_()
    (source,) = re.findall(r'srcdoc="([^"]*)"', framed)
    assert read(html.unescape(source)) == json.loads(json.dumps(c._contents()))
    assert 'sandbox="allow-scripts"' in framed and EVIL not in framed


# -- in a browser

needs_browser = pytest.mark.skipif(bool(browser.missing_programs()), reason=browser.missing_programs())
TREEITEM = '[role="treeitem"]'


def test_the_report_says_where_a_weight_is_only_stored_so(tmp_path):
    """As `why` does: the batch has the axis first."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    with sharding.mesh(fsdp=8):
        w, x = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
        c = sharding.jit(step, in_shardings=(P("fsdp"), P("fsdp")), donate_argnums=0).complete(w, x)
    assert "stored so" in str(c.why("w")) and "stored so" not in str(c.why("x"))
    assert sum("stored so" in text for text in read(c.report(tmp_path / "r.html").read_text())["strings"]) == 1


@pytest.fixture(scope="session")
def chromium():
    pytest.importorskip("selenium")
    with browser.chromium() as driver:
        yield driver


@pytest.fixture
def page(chromium, path):
    browser.set_viewport(chromium, 1280, 900)
    chromium.get_log("browser")
    chromium.get(path.as_uri())
    yield chromium
    assert [entry for entry in chromium.get_log("browser") if entry["level"] != "INFO"] == []


def one(page, selector):
    return page.find_element("css selector", selector)


def every(page, selector):
    return page.find_elements("css selector", selector)


def keys(page, *pressed):
    from selenium.webdriver import ActionChains, Keys

    for key in pressed:
        ActionChains(page).send_keys(getattr(Keys, key, key)).perform()


def open_all(page):
    closed = "document.querySelectorAll('[role=tree] [aria-expanded=false] > .row')"
    page.execute_script(f"for (let rows; (rows = {closed}).length;) rows.forEach(row => row.click())")


def open_all_at(page, value):
    """Expands the whole tree and selects one value."""
    open_all(page)
    page.execute_script("arguments[0].click()", one(page, f'[data-value="{value}"] > .row'))


def explanation(page):
    """The panel's lines, as `why` writes them."""
    texts = "return [...document.querySelectorAll('#why li, #why section > p, #why > p')].map(e => e.textContent)"
    return [text.replace("\u2190", "<-") for text in page.execute_script(texts)]


def expected(c, name):
    lines = [line.strip() for line in c.why(name)]
    if lines == [f"{name} is a scalar"]:
        return ["A scalar: no dims to shard."]
    return [line.split(" is replicated: ")[-1] for line in lines if not re.search(r" is sharded over .*:$", line)]


@needs_browser
def test_a_click_on_a_value_shows_its_chain(c, page):
    open_all(page)
    for name in ("params/layers/0/w2", "params/bias", "out/1", "x"):
        v = c.value(name)
        page.execute_script("arguments[0].click()", one(page, f'[data-value="{v}"] > .row'))
        assert explanation(page) == expected(c, name)
        assert name.rpartition("/")[2] in one(page, "#announcement").get_property("textContent")
        assert one(page, f'[data-value="{v}"]').get_attribute("aria-selected") == "true"
    assert every(page, "svg .device.marked")


@needs_browser
def test_a_step_of_a_chain_leads_to_its_value(c, page):
    open_all(page)
    page.execute_script("arguments[0].click()", one(page, f'[data-value="{c.value("params/layers/0/w2")}"] > .row'))
    last = every(page, "#why .chain button")[-1]
    name = last.text.split(" dim ")[0]
    last.click()
    assert one(page, "#why h2").text == name


@needs_browser
def test_a_url_may_select_a_value(c, page, path):
    page.get("about:blank")
    page.get(f"{path.as_uri()}#value=params/layers/3/w1")
    assert one(page, "#why h2").text == "params/layers/3/w1"
    assert one(page, '[aria-selected="true"]').get_attribute("data-value") == str(c.value("params/layers/3/w1"))
    assert one(page, '[aria-selected="true"]').is_displayed()
    keys(page, "ESCAPE")
    assert one(page, "#why h2").text == "Why" and not every(page, '[aria-selected="true"]')


@needs_browser
def test_the_keyboard_does_the_same(c, page):
    page.execute_script("document.querySelector('[role=treeitem][tabindex=\"0\"]').focus()")
    seen = set()
    for _ in range(60):
        here = page.switch_to.active_element
        if here.get_attribute("data-value"):
            break
        seen.add(here.get_attribute("aria-label"))
        keys(page, *(["ARROW_RIGHT"] if here.get_attribute("aria-expanded") == "false" else []), "ARROW_DOWN")
    v = int(here.get_attribute("data-value"))
    assert len(seen) > 1 and here.get_attribute("aria-label").startswith(c.assignment.graph.label(v).rpartition("/")[2])
    keys(page, "ENTER")
    assert explanation(page) == expected(c, c.assignment.graph.label(v))
    keys(page, "ARROW_DOWN", " ")
    assert explanation(page) == expected(
        c, c.assignment.graph.label(int(page.switch_to.active_element.get_attribute("data-value")))
    )
    item = page.switch_to.active_element
    keys(page, "ARROW_RIGHT", "TAB", "TAB", "ENTER")  # into the panel, past its close button, to the first step
    assert page.switch_to.active_element.get_attribute("id") == "why"
    keys(page, "ESCAPE")
    assert page.switch_to.active_element.get_attribute("aria-selected") == "true"
    page.execute_script("arguments[0].focus()", item)
    keys(page, "ARROW_LEFT", "ARROW_LEFT", "HOME")
    assert page.switch_to.active_element.get_attribute("aria-label").startswith("Arguments")


@needs_browser
def test_filtering_values(c, page):
    from selenium.webdriver.support.ui import WebDriverWait

    one(page, "#filter").send_keys("W1 tensor")
    WebDriverWait(page, 10).until(lambda p: one(p, "#found").text)
    names = [n for n in c.assignment.graph.names if n.endswith("w1")]
    found = every(page, TREEITEM)
    assert one(page, "#found").text == f"{len(names)} values" and len(found) == len(names)
    assert one(found[0], ".spec").text == "[-, tensor]"


@needs_browser
def test_names_are_never_markup(c, page):
    open_all(page)
    assert not every(page, "main b b, [role=tree] b")
    page.execute_script("arguments[0].click()", one(page, f'[data-value="{c.value(EVIL)}"] > .row'))
    assert one(page, "#why h2").get_property("textContent") == EVIL


@needs_browser
def test_sorting_sorts(page, data):
    head, bytes_column = "#communication th", 3

    def column():
        titles = "return [...document.querySelectorAll(arguments[0])].map(cell => cell.title)"
        cells = page.execute_script(titles, f"#communication tbody td:nth-child({bytes_column + 1}) span[title]")
        return [int(title.split()[0].replace(",", "")) for title in cells]

    more = one(page, "#communication button.more")
    if more.is_displayed():
        more.click()
    heads = every(page, head)
    sizes = sorted((row[3] for row in data["collectives"]), reverse=True)
    assert heads[bytes_column].get_attribute("aria-sort") == "descending" and column() == sizes[: len(column())]
    for position in (0, len(heads) - 1):
        button = one(heads[position], "button")
        button.click()
        first = heads[position].get_attribute("aria-sort")
        button.click()
        assert {first, heads[position].get_attribute("aria-sort")} == {"ascending", "descending"}
        assert sum(h.get_attribute("aria-sort") is not None for h in heads) == 1
    one(heads[bytes_column], "button").click()
    one(heads[bytes_column], "button").click()
    assert column() == sorted(column())


@needs_browser
def test_further_tables_are_shown_in_their_order(page, c, tmp_path):
    columns = Column("phase"), Column("peak", "bytes")
    table = Table("the <b>job", columns, [("evaluation", 1_000), ("step", 3_000_000), ("rest", None)])
    page.get(c.report(tmp_path / "page.html", tables=[table]).as_uri())
    assert "The <b>job" in [heading.text for heading in every(page, "#tables h3")]
    rows = every(page, '#tables [aria-label="the <b>job"] tbody tr')
    assert [row.text.split() for row in rows] == [["evaluation", "1", "kB"], ["step", "3", "MB"], ["rest", "\u2013"]]
    head = every(page, '#tables [aria-label="the <b>job"] th')[1]
    one(head, "button").click()
    assert head.get_attribute("aria-sort") == "descending"


@needs_browser
def test_without_further_tables_there_is_no_section_for_them(page):
    assert not one(page, "#tables").is_displayed()


@needs_browser
def test_the_memory_cursor_shows_live_arrays(page, data):
    chart, memory = one(page, ".chart"), data["memory"]
    page.execute_script("arguments[0].focus()", chart)
    rows = [memory["transient"][k : k + 3] for k in range(0, len(memory["transient"]), 3)]

    def live(point):
        found = [memory["arrays"][n] for n in memory["resident"]]
        return found + [memory["arrays"][n] for n, born, more in rows if born <= point <= born + more]

    def check(point):
        assert int(chart.get_attribute("aria-valuenow")) == point
        arrays = live(point)
        assert f"live in {len(arrays)} arrays" in one(page, "#live-head").text
        largest = max(array[0] for array in arrays)
        shown = [cell.get_attribute("title") for cell in every(page, "#live td span[title]")]
        assert int(shown[0].split()[0].replace(",", "")) >= largest
        assert sum(int(title.split()[0].replace(",", "")) for title in shown) == sum(array[0] for array in arrays)

    check(int(chart.get_attribute("aria-valuenow")))  # the peak, initially
    last = len(memory["lines"]) - 1
    for key, point in (
        ("HOME", 0),
        ("ARROW_RIGHT", 1),
        ("END", last),
        ("ARROW_LEFT", last - 1),
        ("ARROW_RIGHT", last),
    ):
        keys(page, key)
        check(point)
    width = chart.size["width"]
    from selenium.webdriver import ActionChains

    ActionChains(page).move_to_element_with_offset(chart, 3 - width // 2, 0).perform()
    assert int(chart.get_attribute("aria-valuenow")) < last


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_does_not_scroll_sideways(page, c, scheme):
    browser.set_viewport(page, 360, 740, scheme=scheme)
    open_all_at(page, c.value("params/layers/0/w2"))
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    assert one(page, "#why").is_displayed()
    one(page, "#why .close").click()
    assert not one(page, "#why").is_displayed()


CONTRAST = Path(__file__).with_name("contrast.js").read_text()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast(page, c, scheme):
    browser.set_viewport(page, 1280, 900, scheme=scheme)
    open_all_at(page, c.value("params/layers/0/w2"))
    assert page.execute_script(CONTRAST) == []


@needs_browser
def test_dark_is_dark(page):
    brightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    assert min(page.execute_script(brightness)) > 200
    browser.set_viewport(page, 1280, 900, scheme="dark")
    assert max(page.execute_script(brightness)) < 60


@needs_browser
def test_every_control_has_a_name_and_every_section_a_heading(page, tmp_path):
    page.get(completed("v5p:2x2x2").report(tmp_path / "report.html").as_uri())
    open_all(page)
    first_of_each = """
      const seen = new Map();
      for (const e of document.querySelectorAll("a, button, input, [tabindex]:not([tabindex='-1'])"))
        if (e.getClientRects().length)
          seen.set([e.tagName, e.className, e.parentElement.tagName, e.getAttribute("role")].join(), e);
      return [...seen.values()];
    """
    controls = page.execute_script(first_of_each)
    assert len(controls) > 8
    assert [e.get_attribute("outerHTML")[:80] for e in controls if not e.accessible_name] == []
    assert {e.aria_role for e in every(page, "#values li")[:5]} == {"treeitem"}
    assert all(one(section, "h2").text for section in every(page, "main > section") if section.is_displayed())
    assert len(every(page, f"{TREEITEM}[tabindex='0']")) == 1
    assert one(page, "html").get_attribute("lang") == "en"


MESHES = [
    {"data": 8, "fsdp": 8, "tensor": 8},
    {"data": 64, "tensor": 8},
    {"pod": 2, "a": 2, "b": 2, "c": 2},
    {"a": 3},
    {"a": 1},
]


LAYERS = {f"layer_{k}": {"w1": floats(512, 2048), "w2": floats(2048, 512)} for k in range(3)}
TEN_AXES = {f"axis{k}": 2 for k in range(10)} | {"alone": 1}


def large_step(params, x):
    def loss(params):
        h = x
        for p in params.values():
            h = jnp.tanh(h @ p["w1"]) @ p["w2"]
        return jnp.mean(h**2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The page of a program with axes of one device, equal layers and conflicts, that does not fit its device."""
    specs = [{k: {"w1": P("a", "b"), "w2": P(None, "b")} for k in LAYERS}, P("b", "a")]
    with sharding.mesh({"a": 2, "one": 1, "b": 4}, devices="h100:1x8"):
        step = sharding.jit(large_step, in_shardings=tuple(specs), policy="shardy")
        c = step.complete(LAYERS, floats(2**25, 512))
    assert c.conflicts and not c.memory().fits("h100")
    return c, c.report(tmp_path_factory.mktemp("large") / "report.html")


def test_axes_of_one_device_are_left_out(large):
    c, path = large
    found = read(path.read_text(encoding="utf-8"))
    assert found["mesh"] == [["a", 2], ["b", 4]]
    assert [row[0] for row in found["memory"]["by_axis"]] == ["a", "b"]


def test_equal_layers_share_rows(large):
    c, path = large
    found = read(path.read_text(encoding="utf-8"))
    names = [row[0] for row in found["memory"]["top"]]
    assert "params/layer_*/w1 (x3)" in names and not any(name.startswith("params/layer_0") for name in names)
    assert {row[0] for row in c.memory().rows()} >= {"params/layer_*/w1 (x3)", "params/layer_*/w2 (x3)"}


def test_conflicts_come_with_their_cure_most_bytes_first(large):
    c, path = large
    conflicts = read(path.read_text(encoding="utf-8"))["conflicts"]
    lost = [row[1] for row in conflicts]
    assert lost == sorted(lost, reverse=True) and sum(lost) == sum(one.bytes_lost for one in c.conflicts)
    assert sum(row[2] for row in conflicts) == len(c.conflicts)
    assert all(row[3] and "in_shardings" in row[3] for row in conflicts)


@needs_browser
@pytest.mark.parametrize("width", [900, 1280])
def test_tiles_and_causes_fit(page, large, width):
    browser.set_viewport(page, width, 1000)
    page.get(large[1].as_uri())
    assert page.execute_script("return document.documentElement.scrollWidth") == width
    tiles = [tile.rect for tile in every(page, "#summary > div")]
    assert len(tiles) % len({tile["y"] for tile in tiles}) == 0 and len({tile["width"] for tile in tiles}) < 3
    clipped = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert page.execute_script(clipped, "#summary > div, #communication .wide, #notes .wide") == 0
    causes = every(page, "#communication td:last-child")
    assert causes and min(cause.rect["width"] for cause in causes) > 150


@needs_browser
def test_what_does_not_fit_is_red(page, large, c, path):
    page.get(large[1].as_uri())
    red = page.execute_script("return getComputedStyle(document.querySelector('#summary .bad a')).color")
    assert "does not fit" in one(page, "#summary .bad").text and "does not fit" in one(page, "#memory p.bad").text
    assert every(page, "#memory .capacity")
    page.get(path.as_uri())
    assert not every(page, ".bad") and not every(page, "#memory .capacity")
    fine = page.execute_script("return getComputedStyle(document.querySelector('#summary a')).color")
    assert red != fine


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ten_axes_have_ten_colours(page, tmp_path, scheme):
    browser.set_viewport(page, 1280, 1000, scheme=scheme)
    with sharding.mesh(TEN_AXES, devices=1024):
        c = sharding.jit(lambda x: x * 2, in_shardings=P(tuple(TEN_AXES))).complete(floats(1024, 8))
    page.get(c.report(tmp_path / "axes.html").as_uri())
    shown = every(page, "#mesh p.axes .axis")
    assert [chip.text for chip in shown] == [f"axis{k}" for k in range(10)]
    assert len({chip.value_of_css_property("background-color") for chip in shown}) == 10


@needs_browser
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_large_meshes_are_drawn_abbreviated(page, sizes, tmp_path):
    with sharding.mesh(sizes, devices=math.prod(sizes.values())):
        c = sharding.jit(lambda x: x * 2, in_shardings=(P(tuple(sizes)),)).complete(floats(1024 * 3, 2))
    page.get(f"{c.report(tmp_path / 'mesh.html').as_uri()}#value=x")
    num_devices = math.prod(sizes.values())
    cells = len(every(page, "svg .device"))
    assert cells == num_devices if num_devices <= 16 else 8 <= cells <= 200
    assert len(every(page, "svg .device.marked")) == 1
    shown = one(page, "#mesh [role=img]").get_attribute("aria-label")
    drawn = {name: size for name, size in sizes.items() if size > 1}
    assert f"{num_devices} device" in shown and all(f"{name}={size}" in shown for name, size in drawn.items())


@needs_browser
def test_several_frames_in_one_notebook(page, c, tmp_path):
    book = tmp_path / "book.html"
    book.write_text(f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{c._repr_html_() * 2}')
    page.get(book.as_uri())
    for frame in every(page, "iframe"):
        page.switch_to.frame(frame)
        assert every(page, TREEITEM) and one(page, "h1").text == "train_step"
        page.switch_to.default_content()
    assert not every(page, "h1")


@needs_browser
@pytest.mark.slow
def test_a_gpt_of_32_unrolled_layers(chromium, tmp_path):
    family, model = workloads.find(ModelOptions(name="gpt3-175b"))
    task = family.build("gpt", dataclasses.replace(model, layers=32, scan=False), Optimization(), steps=10, seed=0)
    with sharding.mesh({"data": 8, "fsdp": 8, "tensor": 8}, devices="v5p:8x8x8") as mesh:
        step = sharding.jit(task.train_step, in_shardings=(None, layouts.batch(mesh.axis_names)), donate_argnums=0)
        c = step.complete(task.state_shapes, task.batch_shapes(512))
    path = c.report(tmp_path / "gpt.html")
    assert len(c.assignment.specs) > 10_000 and path.stat().st_size < 1_000_000
    browser.set_viewport(chromium, 1280, 900)
    name = "state/opt_state/1/0/mu/blocks/0/mlp/w1"
    chromium.get(f"{path.as_uri()}#value={name}")
    assert explanation(chromium) == expected(c, name)
    assert len(every(chromium, TREEITEM)) < 200
    assert [entry for entry in chromium.get_log("browser") if entry["level"] != "INFO"] == []
