"""Ledgers, memory reports, timelines and locks made by hand, compared with slow references; nothing is traced."""

import dataclasses
import itertools
import json
import math
import random

import pytest

from sharding import ShardingError, hardware
from sharding.explain import Array, Collective, Ledger, Lock, MemoryReport, Verification
from sharding.explain.compile_time import CompileTime
from sharding.explain.host_bytes import HostBytes
from sharding.explain.largest_batch import largest_batch
from sharding.explain.memory_fit import fit
from sharding.explain.memory_timeline import MemoryTimeline
from sharding.explain.peak_error import PEAK_ERRORS
from sharding.explain.unknown_ops import UnknownOp, UnknownOps
from sharding.explain.verification import COLUMNS
from sharding.graph import Loop


def collective(kind: str = "all-gather", **changes) -> Collective:
    facts = {"num_devices": 4, "count": 1, "result_bytes": 64, "dtype": "float32"}
    facts |= {"axes": ("a",), "op": "dot_general", "source": "a.py:1", "cause": "operand 0"}
    return Collective(kind=kind, **(facts | changes))


def ledger(seed: int) -> Ledger:
    generator = random.Random(seed)
    return Ledger(
        [
            collective(
                generator.choice(["all-gather", "all-reduce", "collective-permute"]),
                axes=generator.choice([("a",), ("a", "b")]),
                count=generator.randrange(1, 4),
                result_bytes=generator.randrange(1, 5),
                source=generator.choice(["a.py:1", "a.py:2"]),
                cause=f"operand 0, blocks/{generator.randrange(3)}/w",
            )
            for _ in range(8)
        ],
        name="step",
        num_devices=4,
    )


LEDGERS = [ledger(seed) for seed in range(25)]


def test_rows_of_equal_layers_are_one_row_most_bytes_first():
    for found in LEDGERS:
        rows = found.rows()
        groups: dict[tuple, list[Collective]] = {}
        for c in found:
            groups.setdefault((c.kind, ", ".join(c.axes), c.source), []).append(c)
        assert {(kind, axes, line): (n, size) for kind, axes, n, size, line, _ in rows} == {
            key: (sum(c.count for c in own), sum(c.count * c.result_bytes for c in own)) for key, own in groups.items()
        }
        assert len(rows) == len(groups)
        for kind, axes, _, _, line, cause in rows:
            causes = {c.cause for c in groups[kind, axes, line]}
            assert cause == (causes.pop() if len(causes) == 1 else "operand 0, blocks/*/w")
        sizes = [row[3] for row in rows]
        assert sizes == sorted(sizes, reverse=True)


def test_totals_of_a_ledger():
    for found in LEDGERS:
        assert found.total_bytes == sum(c.count * c.result_bytes for c in found)
        assert found.total_bytes == sum(size for _, size in found.by_kind().values())
        assert found.total_wire_bytes == sum(
            c.count * {"all-gather": 1, "all-reduce": 2}.get(c.kind, 0) * (c.result_bytes * 3 // 4)
            + c.count * c.result_bytes * (c.kind == "collective-permute")
            for c in found
        )
        assert sum(n for n, _ in found.by_kind().values()) == sum(c.count for c in found)
        assert list(found[2:5]) == list(found)[2:5] and isinstance(found[2:5], Ledger)
        assert found[1:].rows() == Ledger(list(found)[1:]).rows() and found[3] == list(found)[3]


def test_titles_count_and_pluralise():
    one, two = collective(), collective("all-reduce", count=2, result_bytes=500)
    assert Ledger([], name="f").tables()[0].title == "f, per device: no collectives"
    assert str(Ledger([], name="f")) == "f, per device: no collectives"
    title = Ledger([one, two], name="f").tables()[0].title
    assert title == "f, per device: 1 all-gather (64 bytes), 2 all-reduces (1 kB)"
    loop = Loop("a.py:9", False)
    inside = two.in_loops([loop, loop, Loop("a.py:8", False)])
    assert inside.loops == ("a.py:9", "a.py:8")
    assert inside.cause == "operand 0, per iteration of the loop at a.py:9, at a.py:8"
    assert one.in_loops([]) is one and one.in_loops([Loop("", False)]).cause.endswith("the loop of unknown length")
    title = Ledger([one, inside], name="f").tables()[0].title
    assert title.endswith(" (1 kB per iteration of loops of unknown length: with_trips)")


def test_other_dtypes_of_a_collective():
    assert collective().in_dtype("bfloat16").result_bytes == 32
    assert collective().in_dtype("int8").result_bytes == 16
    assert collective(dtype="bfloat16").in_dtype("float32").result_bytes == 128
    assert collective().in_dtype("int32") == dataclasses.replace(collective(), dtype="int32")


def test_a_collective_as_text():
    text = str(collective(axes=("a", "b")))
    assert text == "all-gather over a, b, 64 bytes of float32: operand 0, a.py:1"
    assert str(collective(count=2)).startswith("all-gather over a, 2 x 64 bytes")


def test_only_reduce_scatters_over_a_whole_slice_are_all_reduced_on_tpus():
    """Which are those over all of at least eight devices; on CPUs every one is."""
    for num_devices in (4, 8, 16):
        for num in (2, 4, 8, 16):
            found = Ledger([collective("reduce-scatter", num_devices=num, result_bytes=2**20)], num_devices=num_devices)
            is_whole = num == num_devices and num >= 8
            assert [c.kind for c in found.lowered("tpu")] == ["all-reduce" if is_whole else "reduce-scatter"]
            assert [c.kind for c in found.lowered("cpu")] == ["all-reduce"]


def test_all_gathers_over_a_large_tpu_slice_are_all_reduced():
    """With links in two dims only small ones are."""
    for name, num_devices in (("v5p", 64), ("v5p", 32), ("v4", 128), ("v5e", 256), ("h100", 64)):
        for num, size in itertools.product((2, num_devices // 2, num_devices), (2**20, 2**25)):
            found = Ledger([collective(num_devices=num, result_bytes=size)], num_devices=num_devices)
            summed = num == num_devices >= 64 and (name in ("v5p", "v4") or (name == "v5e" and size == 2**20))
            kinds = [c.kind for c in found.lowered(hardware.CHIPS[name])]
            assert kinds == ["all-reduce" if summed else "all-gather"], (name, num, size)


def unknown(**changes) -> UnknownOp:
    facts = {"op": "f", "source": "a.py:1", "gathered": ("x [a]",), "num_bytes": 64, "count": 1}
    return UnknownOp(**(facts | {"is_predicted": True, "fix": "register it"} | changes))


def test_unknown_ops_are_listed_once():
    text = str(UnknownOps([unknown(), unknown(count=2), unknown()]))
    assert (
        text
        == "f at a.py:1: gathers x [a], 64 bytes per device (x2)\nf at a.py:1: gathers x [a], 2 x 64 bytes per device"
    )
    assert str(unknown(gathered=(), source="")) == "f: no sharded operands"
    found = Ledger([], unknown=[unknown(), unknown(is_predicted=False)], find_cut_searches=lambda: ("dot at a.py:2",))
    assert found.notes() == ["not predicted: f at a.py:1: may gather x [a], 64 bytes per device",
                             "search cut short: dot at a.py:2"]  # fmt: skip
    assert found[:0].notes() == found.notes() == found.lowered("cpu").notes()


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_peak_at_the_limit_fits(off: int):
    chip = hardware.chip("h100")
    usable = chip.usable_memory_bytes
    assert usable is not None and chip.memory_bytes is not None and usable < chip.memory_bytes
    found = fit(usable + off, "h100")
    assert bool(found) == (off <= 0) and found.spare_bytes == -off and found.usable_bytes == usable
    assert found.certainty == ("yes" if off <= 0 else "no")
    whole = fit(chip.memory_bytes + off, "h100", usable=1)
    assert bool(whole) == (off <= 0) and whole.usable_bytes == whole.memory_bytes == chip.memory_bytes
    assert fit(0, "h100", usable=0.5).usable_bytes == chip.memory_bytes // 2
    # What others keep counts only where it is more than what the share leaves.
    left = chip.memory_bytes - usable
    assert fit(0, "h100", outside_bytes=left + off).usable_bytes == usable - max(0, off)
    assert fit(0, "h100", outside_bytes=2 * chip.memory_bytes).usable_bytes == 1


def test_certainty():
    usable = hardware.chip("h100").usable_memory_bytes or 0
    for low in (-1, 0, 1):
        for high in range(low, 2):
            found = fit(usable, "h100", range_bytes=(usable + low, usable + high))
            expected = "yes" if high <= 0 else "no" if low > 0 else "unsure"
            assert found.certainty == expected and ("; unsure: " in str(found)) == (expected == "unsure")
    assert "beside 5 bytes for NCCL" in str(fit(1, "h100", outside_bytes=5)) and "NCCL" not in str(fit(1, "h100"))


@pytest.mark.parametrize("share", [0, -0.1, 1.01, math.nan])
def test_no_share_of_a_memory(share: float):
    with pytest.raises(ShardingError, match="above 0 and at most 1"):
        fit(1, "h100", usable=share)


def array(num_bytes: int, born: int = 0, dies: int = 0, **changes) -> Array:
    facts = {"name": "x", "kind": "temporaries", "op": "add", "axes": (), "source": "a.py:1"}
    facts |= {"last_source": "", "saved_bytes": {}}
    return Array(num_bytes=num_bytes, born=born, dies=dies, **(facts | changes))


def test_live_bytes_are_those_of_the_live_arrays():
    generator = random.Random(0)
    for _ in range(50):
        num = generator.randrange(1, 9)
        transient = []
        for _ in range(generator.randrange(12)):
            born, dies = sorted(generator.choices(range(num), k=2))
            transient.append(array(generator.randrange(1, 100), born, dies))
        resident = tuple(array(generator.randrange(1, 100), 0, num - 1) for _ in range(generator.randrange(3)))
        found = MemoryTimeline(
            sources=("",) * num, depths=(0,) * num, resident=resident, transient=tuple(transient)
        ).num_bytes()
        arrays = (*resident, *transient)
        assert found == [sum(a.num_bytes for a in arrays if a.born <= step <= a.dies) for step in range(num)]


def report(arrays: list[Array], **changes) -> MemoryReport:
    facts = {"argument_bytes": 100, "result_bytes": 10, "temporary_bytes": 1000, "timeline": ()}
    facts |= {"name": "step", "mesh": (("a", 2), ("b", 4), ("c", 1)), "platform": "cpu"}
    return MemoryReport(arrays=tuple(arrays), **(facts | changes))


ARRAYS = [
    array(600, axes=("a",), kind="gradients", saved_bytes={"b": 450}),
    array(300, axes=("a", "b"), source="a.py:2"),
    array(90, op="", kind="inputs", source="", saved_bytes={"a": 45, "b": 0}, name="blocks/0/w"),
    array(10, op="", kind="inputs", source="", axes=("b",), saved_bytes={"a": 5}, name="blocks/1/w"),
]


def test_sums_of_a_memory_report():
    found = report(ARRAYS)
    assert (found.peak_bytes, found.gap_bytes) == (1110, 110)
    assert list(found.by_class.items()) == [("gradients", 600), ("temporaries", 300), ("gaps", 110), ("inputs", 100)]
    assert list(found.by_source.items()) == [("a.py:1", 600), ("a.py:2", 300), ("(gaps)", 110), ("(arguments)", 100)]
    shares = {name: (s.num_devices, s.split_bytes, s.whole_bytes, s.saved_bytes) for name, s in found.by_axis.items()}
    assert shares == {"a": (2, 900, 100, 50), "b": (4, 310, 690, 450), "c": (1, 0, 1000, 0)}
    assert found.by_axis["b"].twice_as_long_saves == 155
    assert found.top(2) == tuple(ARRAYS[:2]) and found.top() == tuple(ARRAYS)
    error = PEAK_ERRORS["cpu"]
    assert found.range_bytes == (int(1110 * error.low), int(1110 * error.high))
    assert error.low < 1 < error.high and error.median < error.large
    full = report(ARRAYS, temporary_bytes=890)
    assert full.gap_bytes == 0 and "gaps" not in full.by_class


def test_tables_of_a_memory_report():
    arrays, categories, axes = (table.rows for table in report(ARRAYS).tables())
    assert [row[1] for row in arrays] == [600, 300, 90, 10]
    assert [row[0] for row in axes] == ["a", "b"]  # an axis of one device shards nothing
    assert [row[2] for row in categories] == [n / 1110 for n in (600, 300, 110, 100)]
    layers = report([*ARRAYS[:2], *(dataclasses.replace(ARRAYS[2], name=f"blocks/{k}/w") for k in range(9))])
    (first, *_) = layers.tables()[0].rows
    assert first[:2] == ("blocks/*/w (x9)", 810)


def test_the_text_of_a_memory_report():
    for num in (9, 10, 11, 13):
        arrays = [array(100 + k, name=f"x{k}", source=f"a.py:{k}") for k in range(num)]
        text = str(report(arrays))
        assert ("more" in text) == (num > 10) and (num <= 10 or f"and {num - 10} more" in text)
        assert "NCCL" not in text and "in the host's memory" not in text
    host = HostBytes(argument_bytes=5, temporary_bytes=7)
    assert host.total_bytes == 12
    text = str(report(ARRAYS, host=host, collective_buffer_bytes=3))
    assert "in the host's memory: 12 bytes (5 bytes of arguments, 7 bytes of temporaries) per device" in text
    assert "outside XLA's memory: 3 bytes for NCCL's buffers" in text


def test_the_largest_batch_is_the_largest_that_fits():
    """Compared with all batches, wherever the limit is."""
    usable = hardware.chip("h100").usable_memory_bytes or 0
    for multiple in (1, 3):
        for limit in (multiple, 10, 16, 17):
            for most in range(0, 20):
                unit = usable // most if most else usable + 1  # `most` rows fit, no more

                def memory(rows: int, unit: int = unit) -> MemoryReport:
                    assert rows % multiple == 0 and 0 < rows <= limit  # noqa: B023
                    return report([], argument_bytes=rows * unit, result_bytes=0, temporary_bytes=0)

                found = largest_batch(memory, "h100", multiple=multiple, limit=limit)
                fitting = [rows for rows in range(multiple, limit + 1, multiple) if rows <= most]
                best = max(fitting, default=0)
                assert found.batch == best
                assert (found.fit is None) == (best == 0) and (found.fit is None or found.fit)
                following = best + multiple if best + multiple <= limit else best
                assert found.next.peak_bytes == following * unit


def test_the_axis_to_double_is_the_one_that_saves_most():
    (limit,) = {hardware.chip("h100").usable_memory_bytes or 0}
    big = {"argument_bytes": limit + 1}
    arrays = [array(100, axes=("a",)), array(300, axes=("b",))]
    assert largest_batch(lambda _: report(arrays, **big), "h100").hint.startswith("doubling axis 'b' would save 150")
    tied = [array(100, axes=("a",)), array(100, axes=("b",))]
    assert "axis 'a'" in largest_batch(lambda _: report(tied, **big), "h100").hint
    assert largest_batch(lambda _: report([array(9)], **big), "h100").hint.startswith("nothing is sharded")
    for multiple, limit in ((0, 4), (5, 4)):
        with pytest.raises(ShardingError, match="1 <= multiple <= limit"):
            largest_batch(lambda _: report([]), "h100", multiple=multiple, limit=limit)


def test_locks_differ_in_each_part(tmp_path):
    lock = Lock(mesh={"a": 2, "b": 4}, specs={"x [8]": "[a]", "y [8]": "[-]"}, collectives={"all-gather": (2, 64)},
                peak_bytes=100)  # fmt: skip
    (tmp_path / "lock").write_text(lock.text())
    assert Lock.read(tmp_path / "lock") == lock and lock.diff(lock) == ()
    changes = {
        "mesh": {"b": 4, "a": 2},  # another order is another mesh
        "specs": {"x [8]": "[b]", "z [8]": "[-]"},
        "collectives": {"all-gather": (2, 65), "all-reduce": (1, 4)},
        "peak_bytes": 101,
    }
    counts = {"mesh": 1, "specs": 3, "collectives": 2, "peak_bytes": 1}
    for part, value in changes.items():
        lines = lock.diff(dataclasses.replace(lock, **{part: value}))
        assert len(lines) == counts[part], lines
    document = json.loads(lock.text())
    for broken in ({"version": 2}, {"mesh": 3}, {"collectives": {"all-gather": {}}}):
        (tmp_path / "lock").write_text(json.dumps(document | broken))
        with pytest.raises(ShardingError, match="a file written by completion.lock"):
            Lock.read(tmp_path / "lock")


def test_verification_compares_each_kind():
    predicted = {"all-gather": (2, 64), "all-reduce": (1, 4)}
    for compiled in ({"all-gather": (2, 64)}, predicted | {"all-reduce": (1, 8)}, predicted | {"all-reduce": (2, 4)}):
        found = Verification(predicted=predicted, compiled=compiled, predicted_peak_bytes=3, compiled_peak_bytes=2)
        assert not found.agrees and found.peak_ratio == 1.5
        (table,) = found.tables()
        assert table.title == "collectives other than predicted" and len(table.rows) == 3
        count, size = compiled.get("all-reduce", (0, 0))
        assert table.rows[1] == ("all-reduce", 1, count, 4, size) and len(COLUMNS) == 5
        assert ("none" in str(found)) == ("all-reduce" not in compiled)
    found = Verification(predicted=predicted, compiled=predicted, predicted_peak_bytes=3, compiled_peak_bytes=0)
    assert found.agrees and found.peak_ratio == 3 and found.tables()[0].title == "collectives as predicted"


def test_classes_of_compile_times():
    for platform in ("cpu", "tpu", "gpu"):
        times = [CompileTime(platform=platform, num_ops=n, layers=None) for n in (1, 30, 1_000, 5_000, 40_000)]
        for one in times:
            expected = "seconds" if one.seconds < 10 else "tens of seconds" if one.seconds < 100 else "minutes"
            assert one.rough == expected and str(one).count("\n") == 0
        assert [one.seconds for one in times] == sorted(one.seconds for one in times)
    assert CompileTime(platform="cpu", num_ops=1000, layers=None).seconds == pytest.approx(6.5)
    assert CompileTime(platform="tpu", num_ops=1000, layers=None).seconds == pytest.approx(8.5)
    assert CompileTime(platform="gpu", num_ops=100, layers=None).seconds == pytest.approx(7)
