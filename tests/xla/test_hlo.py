"""HLO of compilers that may not be installed: shortened by hand from XLA:TPU (libtpu 0.0.51) and XLA:GPU output."""

import jax.numpy as jnp
import pytest

from sharding import ShardingError
from sharding.cost import CompiledCollective, read_hlo
from sharding.xla.hlo import Array, arrays, read_module, read_type

MESH = {"data": 2, "tensor": 4}
ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def entry(*lines, types="(p: f32[8,4]) -> f32[8,4]"):
    return "\n".join([ADD, f"ENTRY %main {types} {{", "  %p = f32[8,4]{1,0} parameter(0)", *lines, "}", ""])


def moved(text):
    return [(c.kind, c.axes, c.dtype, c.shape, c.count) for c in read_hlo(text, mesh=MESH).collectives]


TPU_LOOPS = """HloModule jit_prog, is_scheduled=true, entry_computation_layout={(bf16[512,256]{1,0:T(8,128)(2,1)})->bf16[512,256]{1,0}}, num_partitions=8

FileNames
1 "lab/steps.py"

FunctionNames
1 "train.<locals>.body"

FileLocations
1 {file_name_id=1 function_name_id=1 line=16 end_line=16 column=16 end_column=16}
2 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=16 end_column=16}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
34 {file_location_id=2 parent_frame_id=1}


%region_2.0 (psum.0: bf16[], psum.1: bf16[]) -> bf16[] {
  %psum.0 = bf16[]{:T(256)} parameter(0)
  %psum.1 = bf16[]{:T(256)} parameter(1)
  ROOT %add.2 = bf16[]{:T(256)} add(%psum.0, %psum.1)
}

%wide.region_1.0_spmd.sunk (wide.param.5: (s32[], bf16[512,256], s32[])) -> (s32[], bf16[512,256], s32[]) {
  %constant.8.clone.1..sunk.1..sunk = s32[]{:T(128)} constant(1)
  %wide.param.5 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.79 = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.5), index=1
  %psum.15 = bf16[512,256]{1,0:T(8,128)(2,1)} all-reduce(%get-tuple-element.79), channel_id=1, replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, use_global_device_ids=true, to_apply=%region_2.0, metadata={op_name="jit(prog)/while/body/while/body/psum" stack_frame_id=1}, backend_config={"flag_configs":[],"barrier_config":{"barrier_type":"CUSTOM","id":"3"}}
  %get-tuple-element.78 = s32[]{:T(128)} get-tuple-element(%wide.param.5), index=0
  %add.28 = s32[]{:T(128)} add(%get-tuple-element.78, %constant.8.clone.1..sunk.1..sunk)
  %get-tuple-element.83 = s32[]{:T(128)} get-tuple-element(%wide.param.5), index=2
  ROOT %tuple.42 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%add.28, %psum.15, %get-tuple-element.83)
}

%wide.region_3.0_spmd (wide.param.1: (s32[], bf16[512,256], s32[])) -> pred[] {
  %constant.5.clone.1 = s32[]{:T(128)} constant(3)
  %wide.param.1 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.46 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
  ROOT %lt.9 = pred[]{:T(512)} compare(%get-tuple-element.46, %constant.5.clone.1), direction=LT
}

%wide.region_0.0_spmd.sunk (wide.param.7: (s32[], bf16[512,256], /*index=2*/s32[], s32[])) -> (s32[], bf16[512,256], s32[], s32[]) {
  %wide.param.7 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, /*index=2*/s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.90 = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.7), index=1
  %collective-permute-start = (bf16[512,256]{1,0:T(8,128)(2,1)}, bf16[512,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.90), channel_id=1, source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}, metadata={op_name="jit(prog)/while/body/ppermute" stack_frame_id=34}
  %get-tuple-element.91 = s32[]{:T(128)} get-tuple-element(%wide.param.7), index=2
  %get-tuple-element.92 = s32[]{:T(128)} get-tuple-element(%wide.param.7), index=3
  %collective-permute-done = bf16[512,256]{1,0:T(8,128)(2,1)} collective-permute-done(%collective-permute-start)
  %copy.20 = s32[]{:T(128)} copy(%get-tuple-element.91)
  %tuple.40 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) tuple(%copy.20, %collective-permute-done, %get-tuple-element.91)
  %while.36 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}) while(%tuple.40), condition=%wide.region_3.0_spmd, body=%wide.region_1.0_spmd.sunk
  %get-tuple-element.93 = s32[]{:T(128)} get-tuple-element(%wide.param.7), index=0
  %constant.8.clone.1..sunk = s32[]{:T(128)} constant(1)
  %add.30 = s32[]{:T(128)} add(%get-tuple-element.93, %constant.8.clone.1..sunk)
  %get-tuple-element.94 = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%while.36), index=1
  ROOT %tuple.44 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, /*index=2*/s32[]{:T(128)}, s32[]{:T(128)}) tuple(%add.30, %get-tuple-element.94, %get-tuple-element.91, %get-tuple-element.92)
}

%wide.region_5.0_spmd (wide.param.3: (s32[], bf16[512,256], s32[], s32[])) -> pred[] {
  %constant.14.clone.1 = s32[]{:T(128)} constant(5)
  %wide.param.3 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.55 = s32[]{:T(128)} get-tuple-element(%wide.param.3), index=0
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.55, %constant.14.clone.1), direction=LT
}

ENTRY %main.0_spmd (param.10: bf16[512,256]) -> bf16[512,256] {
  %constant.26.clone.1 = s32[]{:T(128)} constant(0)
  %constant.8.clone.1 = s32[]{:T(128)} constant(1)
  %param.10 = bf16[512,256]{1,0:T(8,128)(2,1)} parameter(0)
  %copy.11 = s32[]{:T(128)} copy(%constant.26.clone.1)
  %tuple.43 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}, s32[]{:T(128)}) tuple(%copy.11, %param.10, %constant.26.clone.1, %constant.8.clone.1)
  %while.35 = (s32[]{:T(128)}, bf16[512,256]{1,0:T(8,128)(2,1)}, s32[]{:T(128)}, s32[]{:T(128)}) while(%tuple.43), condition=%wide.region_5.0_spmd, body=%wide.region_0.0_spmd.sunk
  ROOT %get-tuple-element.33 = bf16[512,256]{1,0:T(8,128)(2,1)} get-tuple-element(%while.35), index=1
}
"""  # noqa: E501


def test_tpu_loops():
    """XLA:TPU annotates no trip counts; the inner loop starts from a constant in the outer loop's state."""
    psum = CompiledCollective(
        kind="all-reduce",
        axes=("tensor",),
        num_devices=4,
        dtype="bfloat16",
        shape=(512, 256),
        result_bytes=2**18,
        count=15,
        is_counted=True,
        is_conditional=False,
        op_name="jit(prog)/while/body/while/body/psum",
        source="steps.py:16 (train.<locals>.body)",
    )
    permute, inner = read_hlo(TPU_LOOPS, mesh=MESH).collectives
    assert inner == psum
    assert (permute.kind, permute.axes, permute.count, permute.bytes) == ("collective-permute", ("data",), 5, 5 * 2**18)
    assert permute.source == "steps.py:17 (train.<locals>.body)"


def test_tpu_loops_with_unknown_trip_counts():
    found = read_hlo(TPU_LOOPS.replace("direction=LT", "direction=NE"))
    assert [(c.count, c.is_counted) for c in found.collectives] == [(1, False), (1, False)]


TPU_SCATTER = """
%add.clone (x.1: bf16[], y.1: bf16[]) -> bf16[] {
  %x.1 = bf16[]{:T(256)} parameter(0)
  %y.1 = bf16[]{:T(256)} parameter(1)
  ROOT %add.1 = bf16[]{:T(256)} add(%x.1, %y.1)
}

%all-reduce-scatter (input: bf16[4096,4096]) -> bf16[2240,4096] {
  %input = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %constant.12 = bf16[] constant(0)
  %pad = bf16[4480,4096]{1,0:T(8,128)(2,1)} pad(%input, %constant.12), padding=0_384x0_0
  %all-reduce.1 = bf16[4480,4096]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, to_apply=%add.clone, frontend_attributes={from-cross-replica-sharding="true"}
  %constant.shard_id_table = u32[8]{0:T(128)} constant({...})
  %partition-id.2 = u32[] partition-id()
  %dynamic-slice.4 = u32[1]{0:T(128)} dynamic-slice(%constant.shard_id_table, %partition-id.2), dynamic_slice_sizes={1}
  %bitcast.1 = u32[]{:T(128)} bitcast(%dynamic-slice.4)
  %constant.13 = u32[] constant(2240)
  %multiply.3 = u32[]{:T(128)} multiply(%bitcast.1, %constant.13)
  %constant.14 = u32[] constant(0)
  ROOT %dynamic-slice.5 = bf16[2240,4096]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %multiply.3, %constant.14), dynamic_slice_sizes={2240,4096}
}

ENTRY %main (param: bf16[4096,4096]) -> bf16[192,4096] {
  %param = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
  %fusion = bf16[2240,4096]{1,0:T(8,128)(2,1)} fusion(%param), kind=kCustom, calls=%all-reduce-scatter, frontend_attributes={is_spmd_generated="true"}
  %slice = bf16[192,4096]{1,0:T(8,128)(2,1)} slice(%fusion), slice={[2048:2240], [0:4096]}
  %start = (bf16[192,4096]{1,0}, bf16[192,4096]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%slice), channel_id=1, source_target_pairs={{0,4},{1,5},{2,6},{3,7}}
  ROOT %done = bf16[192,4096]{1,0} collective-permute-done(%start)
}
"""  # noqa: E501


def test_an_all_reduce_fused_with_its_slice_is_a_reduce_scatter():
    """XLA pads to equal shares of the rings, then moves rows between the padded shards: both belong to it."""
    (c,) = read_hlo(TPU_SCATTER, mesh=MESH).collectives
    assert (c.kind, c.axes, c.shape) == ("reduce-scatter", ("data",), (4096, 4096))
    assert (c.bytes, c.wire_bytes) == (4096 * 4096 * 2, 4096 * 4096)


@pytest.mark.parametrize("moved", ["%fusion", "%slice"])
def test_rows_of_a_padded_reduce_scatter_may_be_copied_before_they_move(moved: str):
    """Between kinds of memory: the shard before its rows are sliced off, or the slice."""
    shape = {"%fusion": "bf16[2240,4096]", "%slice": "bf16[192,4096]"}[moved]
    copies = (
        f"  %copy-start = ({shape}{{1,0:S(1)}}, {shape}{{1,0}}, u32[]{{:S(2)}}) copy-start({moved})",
        f"  %copy-done = {shape}{{1,0:S(1)}} copy-done(%copy-start)",
    )
    lines = TPU_SCATTER.splitlines()
    (made,) = (k for k, line in enumerate(lines) if line.startswith(f"  {moved} = "))
    after = [line.replace(f"({moved})", "(%copy-done)") for line in lines[made + 1 :]]
    (c,) = read_hlo("\n".join([*lines[: made + 1], *copies, *after]), mesh=MESH).collectives
    assert (c.kind, c.shape) == ("reduce-scatter", (4096, 4096))


TPU_WINDOWED = """
%cond (s: (f32[8,4], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(4)
  %s = (f32[8,4]{1,0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%s), index=1
  ROOT %compare.20 = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%body (t: (f32[8,4], u32[])) -> (f32[8,4], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %t = (f32[8,4]{1,0}, u32[]{:T(128)}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%t), index=1
  %x = f32[8,4]{1,0} get-tuple-element(%t), index=0
  %start = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,3},{1,0},{2,1},{3,2},{4,7},{5,4},{6,5},{7,6}}
  %done = f32[8,4]{1,0} collective-permute-done(%start)
  %next = u32[]{:T(128)} add(%j, %two)
  ROOT %u = (f32[8,4]{1,0}, u32[]{:T(128)}) tuple(%done, %next)
}
"""  # noqa: E501


def test_a_windowed_einsum_on_tpu():
    lines = (
        "  %zero = u32[]{:T(128)} constant(0)",
        "  %c = u32[]{:T(128)} copy(%zero)",
        "  %state = (f32[8,4]{1,0}, u32[]{:T(128)}) tuple(%p, %c)",
        "  %while.10 = (f32[8,4]{1,0}, u32[]{:T(128)}) while(%state), condition=%cond, body=%body",
        "  ROOT %r = f32[8,4]{1,0} get-tuple-element(%while.10), index=0",
    )
    assert moved(TPU_WINDOWED + entry(*lines)) == [("collective-permute", ("tensor",), "float32", (8, 4), 2)]


GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"
ASYNCHRONOUS = {
    "sum": (
        f"(f32[8,4]{{1,0}}, f32[3]{{0}}) all-reduce-start(%p, %p), {GROUPS}, to_apply=%add",
        [("all-reduce", (8, 4)), ("all-reduce", (3,))],
    ),
    "sum of one": (f"f32[8,4]{{1,0}} all-reduce-start(%p), {GROUPS}, to_apply=%add", [("all-reduce", (8, 4))]),
    "sum with its operand": (
        f"((f32[8,4]{{1,0}}), f32[8,4]{{1,0}}) all-reduce-start(%p), {GROUPS}, use_global_device_ids=true, "
        "to_apply=%add, output_to_operand_aliasing={{1}: (0, {})}",
        [("all-reduce", (8, 4))],
    ),
    "sum of two with their operands": (
        f"((f32[8,4], f32[3]), (f32[8,4], f32[3])) all-reduce-start(%p, %p), {GROUPS}, to_apply=%add",
        [("all-reduce", (8, 4)), ("all-reduce", (3,))],
    ),
    "gather": (
        f"(f32[8,4]{{1,0}}, f32[32,4]{{1,0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}",
        [("all-gather", (32, 4))],
    ),
    "gather of two": (
        f"((f32[8,4]{{1,0}}, f32[2]), (f32[32,4]{{1,0}}, f32[8])) all-gather-start(%p, %p), {GROUPS}, dimensions={{0}}",
        [("all-gather", (32, 4)), ("all-gather", (8,))],
    ),
    "scatter": (
        f"((f32[8,4]{{1,0}}), f32[8,1]{{1,0}}) reduce-scatter-start(%p), {GROUPS}, dimensions={{1}}, to_apply=%add",
        [("reduce-scatter", (8, 4))],
    ),
    "all to all": (
        f"((f32[8,4]{{1,0}}), f32[8,4]{{1,0}}, u32[]) all-to-all-start(%p), {GROUPS}, dimensions={{0}}",
        [("all-to-all", (8, 4))],
    ),
    "permute with its operand": (
        "((f32[8,4]{1,0}), f32[8,4]{1,0}) collective-permute-start(%p), source_target_pairs={{0,1},{1,2}}",
        [("collective-permute", (8, 4))],
    ),
    "permute": (
        "(f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%p), source_target_pairs={{0,1},{1,2}}",
        [("collective-permute", (8, 4))],
    ),
    "permute to itself": (
        "(f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%p), source_target_pairs={{0,0},{1,1}}",
        [],
    ),
    "half of a permute": (
        '(f32[8,4], u32[], token[]) recv(%p), channel_id=1, frontend_attributes={_xla_send_recv_pipeline="0",'
        "_xla_send_recv_source_target_pairs={{0,1},{1,2}}}",
        [("collective-permute", (8, 4))],
    ),
    "from the host": ("(f32[8,4], u32[], token[]) recv(%p), channel_id=1, is_host_transfer=true", []),
    "ragged": (f"f32[9,4]{{1,0}} ragged-all-to-all(%p, %p), {GROUPS}", [("all-to-all", (9, 4))]),
    "broadcast": (f"f32[8,4] collective-broadcast(%p), {GROUPS}", [("collective-permute", (8, 4))]),
}


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_forms(name):
    written, expected = ASYNCHRONOUS[name]
    kind = written.split("-start(")[0].split(" ")[-1]
    text = entry(f"  %start = {written}", f"  ROOT %done = f32[8,4]{{1,0}} {kind}-done(%start)")
    assert moved(text) == [(kind, ("tensor",), "float32", shape, 1) for kind, shape in expected]


def test_an_asynchronous_call_counts_once():
    wrapped = f"""
%wrapped (q: f32[8,4]) -> f32[2,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %rs = f32[2,4]{{1,0}} reduce-scatter(%q), {GROUPS}, dimensions={{0}}, to_apply=%add
}}, execution_thread="async"
"""
    lines = (
        "  %s = ((f32[8,4]{1,0}), f32[2,4]{1,0}, u32[]) async-start(%p), calls=%wrapped",
        "  %u = ((f32[8,4]{1,0}), f32[2,4]{1,0}, u32[]) async-update(%s), calls=%wrapped",
        "  ROOT %d = f32[2,4]{1,0} async-done(%u), calls=%wrapped",
    )
    assert moved(wrapped + entry(*lines)) == [("reduce-scatter", ("tensor",), "float32", (8, 4), 1)]


def fused_steps(*targets):
    """A gather in three fusions, as XLA:TPU (v5e) puts its steps into the products beside it."""
    call = '  ROOT %c.{0} = f32[32,4]{{1,0}} custom-call(%g.{0}), custom_call_target="{1}"'
    for k, target in enumerate(targets):
        gather = f"%g.{k} = f32[32,4]{{1,0}} all-gather(%q.{k}), {GROUPS}, dimensions={{0}}"
        last = call.format(k, target) if target else f"  ROOT %m.{k} = f32[32,4]{{1,0}} negate(%g.{k})"
        yield "\n".join(
            [
                f"%step.{k} (q.{k}: f32[8,4]) -> f32[32,4] {{",
                f"  %q.{k} = f32[8,4]{{1,0}} parameter(0)",
                f'  {gather}, frontend_attributes={{chain_id="3"}}',
                last,
                "}",
                "",
            ]
        )


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("AsyncCollectiveStart", "", "AsyncCollectiveDone"), 1),
        (("AsyncCollectiveStart", "AsyncCollectiveDone"), 1),
        (("",), 1),
        (("AsyncCollectiveStart", "", "AsyncCollectiveStart", ""), 2),
    ],
)
def test_the_steps_of_a_gather_in_several_fusions_count_once(targets, count):
    lines = [f"  %f.{k} = f32[32,4]{{1,0}} fusion(%p), kind=kCustom, calls=%step.{k}" for k in range(len(targets))]
    text = "\n".join(fused_steps(*targets)) + entry(*lines, "  ROOT %r = f32[8,4]{1,0} negate(%p)")
    assert moved(text) == [("all-gather", ("tensor",), "float32", (32, 4), 1)] * count


def test_a_computation_that_is_called_twice_counts_twice():
    inner = f"""
%inner (q: f32[8,4]) -> f32[8,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %ar = f32[8,4]{{1,0}} all-reduce(%q), {GROUPS}, to_apply=%add
}}
"""
    twice = """
%twice (q: f32[8,4]) -> f32[8,4] {
  %q = f32[8,4]{1,0} parameter(0)
  %a = f32[8,4]{1,0} call(%q), to_apply=%inner
  ROOT %b = f32[8,4]{1,0} fusion(%a), kind=kCustom, calls=%inner
}
"""
    lines = (
        "  %a = f32[8,4]{1,0} call(%p), to_apply=%twice",
        '  %w = f32[8,4]{1,0} while(%a), condition=%twice, body=%twice, backend_config={"known_trip_count":{"n":"5"}}',
        "  %n = s32[] constant(1)",
        "  ROOT %c = f32[8,4]{1,0} conditional(%n, %w, %w), true_computation=%twice, false_computation=%add",
    )
    (c,) = read_hlo(inner + twice + entry(*lines)).collectives
    assert c.count == 2 * (1 + 5 + 6 + 1)
    assert (c.is_counted, c.is_conditional) == (True, True)


def test_an_unreachable_computation_is_not_counted():
    unused = f"""
%unused (q: f32[8,4]) -> f32[8,4] {{
  %q = f32[8,4]{{1,0}} parameter(0)
  ROOT %ar = f32[8,4]{{1,0}} all-reduce(%q), {GROUPS}, to_apply=%add
}}
"""
    assert read_hlo(unused + entry("  ROOT %r = f32[8,4]{1,0} copy(%p)")).by_kind() == {}


def test_source_lines_of_older_metadata():
    where = 'metadata={op_name="jit(f)/name \\"x\\"/psum" source_file="/a/b/model.py" source_line=12}'
    text = entry(f"  ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add, {where}")
    (c,) = read_hlo(text).collectives
    assert (c.source, c.op_name) == ("model.py:12", 'jit(f)/name \\"x\\"/psum')


def test_kinds_come_in_one_order():
    text = entry(
        "  %a = f32[8,4]{1,0} all-to-all(%p), dimensions={0}",
        "  %b = (f32[2,4], f32[2,4]) all-to-all(%p, %p), replica_groups={{0,1},{2,3}}",
        "  ROOT %c = f32[16,4]{1,0} all-gather(%p), replica_groups=[4,2]<=[8], dimensions={0}",
    )
    assert list(read_hlo(text).by_kind().items()) == [
        ("all-gather", (1, 256)),
        ("all-to-all", (2, 128 + 64)),
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("f32[8,4]{1,0:T(8,128)(2,1)S(1)}", [("float32", (8, 4), 128)]),
        ("(s32[], (pred[3]{0}, /*index=1*/c64[2,2]{1,0}), u32[]{:S(2)})", [4, 3, 32, 4]),
        ("bf16[<=8,4]{1,0}", [("bfloat16", (8, 4), 64)]),
        ("s4[3,3]{1,0:E(4)}", [("int4", (3, 3), 5)]),
        ("token[]", [("token", (), 0)]),
        ("()", []),
    ],
)
def test_types(text, expected):
    found = [(a.dtype, a.shape, a.num_bytes) for a in arrays(read_type(text))]
    assert found == expected or [num_bytes for *_, num_bytes in found] == expected


HLO_NAMES = "pred s8 u16 s64 f16 bf16 f32 f64 c64 c128 f8e4m3fn f8e5m2 f8e4m3b11fnuz f8e8m0fnu f8e3m4 f4e2m1fn"


@pytest.mark.parametrize("name", HLO_NAMES.split())
def test_types_have_the_names_and_sizes_of_jax(name):
    (found,) = arrays(read_type(f"{name}[16]"))
    assert isinstance(found, Array)
    assert str(jnp.dtype(found.dtype)) == found.dtype
    assert (
        found.num_bytes == 16 * jnp.finfo(found.dtype).bits // 8
        if name[0] in "fb"
        else 16 * jnp.dtype(found.dtype).itemsize
    )


def test_hlo_without_an_entry_is_an_error():
    with pytest.raises(ShardingError, match=r"(?s)1 HLO computations, none an ENTRY.*compile"):
        read_module(ADD)
