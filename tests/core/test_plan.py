"""Plans are plain values: made for any device without it, memoised, with their workspace known beforehand."""

import re
from dataclasses import replace
from itertools import pairwise, product

import kit
import numpy as np
import pytest
from hopper import NEEDS_INLINE_PTX

from xmla.core.call import LARGEST_SIZE
from xmla.core.compile import Specialization, specialize
from xmla.core.compile import compiler as compile
from xmla.core.errors import ArgumentError, UnsupportedError
from xmla.core.formats.mla import V4
from xmla.core.models.base import Model
from xmla.core.models.calls import Call
from xmla.core.models.glm_flash import ModelConfigGlmFlash
from xmla.core.models.mistral_large4 import ModelConfigMistralLarge4
from xmla.core.models.v4 import ModelConfigV4
from xmla.core.models.v32 import ModelConfig
from xmla.core.models.v41 import ModelConfigV41
from xmla.core.op import Case, Op, plan_call
from xmla.core.ops.attention.sparse_mla.backward.gluon_sm90.plan import FACTORS_BYTES, FEW_HEADS, LEAST_KEYS
from xmla.core.ops.slots.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.registry import registry
from xmla.core.values import B200, GB10, H200, INTERPRETER, KNOWN_DEVICES, RTX_PRO_6000, Device, Spec


@pytest.mark.parametrize("device", [*KNOWN_DEVICES, INTERPRETER], ids=lambda device: device.name)
@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_plan(op: Op, case: Case, device: Device) -> None:
    plan = kit.plan_of(op, case, device)
    assert plan is kit.plan_of(op, case, device), "plans are memoised"
    assert set(plan.results) == set(op.outputs) and set(plan.results) <= set(plan.buffers)
    known = set(op.tensors) | set(plan.buffers)
    written: set[str] = set(op.tensors)
    for launch in plan.launches:
        assert set(launch.reads) <= known and set(launch.reads) <= written, "an input nobody wrote"
        written |= set(launch.writes)
        assert all(0 <= size < 2**31 for size in launch.sizes.values())
        assert len(launch.grid) == 1, "the unbounded axis is grid x"
        hash(launch)
    assert {name for name in plan.results if plan.buffers[name].nbytes} <= written
    end = 0
    for name, offset in plan.workspace.items():
        assert offset % 256 == 0 and offset >= end, "buffers of the workspace overlap"
        end = offset + plan.buffers[name].nbytes
    assert end <= plan.workspace_bytes < end + 256
    assert set(plan.workspace) == set(plan.buffers) - set(plan.results)


@NEEDS_INLINE_PTX
def test_composed_step_runs_the_launches_of_its_parts() -> None:
    ops = registry()
    plan = kit.plan_of(ops["dsa_attention"], ops["dsa_attention"].cases[0], H200)
    parts = [
        "quantize_indexer_query",
        "indexer_logits_paged",
        "select_slots_cluster_sm90",
        "sparse_mla_sm90",
    ]
    assert [launch.name.removesuffix("_kernel") for launch in plan.launches][: len(parts)] == parts


OF_ENTRIES = {
    "positions_ptr": "", "state_table_ptr": "", "block_table_ptr": "", "request_ids_ptr": "HAS_REQUEST_IDS",
}  # fmt: skip
OF_ATTENTION = {
    "lengths_ptr": "SOURCE.HAS_LENGTHS", "extra_lengths_ptr": "EXTRA.HAS_LENGTHS", "positions_ptr": "EPILOGUE.ROPE",
}  # fmt: skip
# What these kernels read before they wait for earlier launches, and if which constexpr is set; others wait first.
OF_ROWS = {"starts_ptr": "HAS_STARTS", "ends_ptr": ""}
READ_EARLY: dict[str, dict[str, str]] = {
    "topk_candidates_kernel": OF_ROWS,
    "topk_cluster_sm90_kernel": OF_ROWS,
    "select_slots_cluster_sm90_kernel": OF_ROWS,
    "indexer_logits_paged_sm90_kernel": {
        "cache_ptr": "KEYS_EARLY", "block_table_ptr": "", "lengths_ptr": "", "request_ids_ptr": "PAGES.HAS_REQUEST_IDS",
    },
    "compress_entries_kernel": OF_ENTRIES,
    "compress_parts_kernel": OF_ENTRIES,
    "sparse_mla_sm90_kernel": {"q_ptr": "", **OF_ATTENTION},
    "sparse_mla_sm100_kernel": OF_ATTENTION,
}  # fmt: skip


@pytest.mark.parametrize("device", [H200, B200], ids=lambda device: device.name)
@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_a_launch_reads_arguments_alone_before_it_waits(op: Op, case: Case, device: Device) -> None:
    """And as a step of another op's call none that earlier launches of it write."""
    specs = {name: Spec.of_numpy(array) for name, array in kit.make(case).items()}
    for implementation in (None, *op.choices):
        try:
            problem = op.bind(specs, op.attributes(**case.attrs), implementation)
            plan = op.plan(problem, device)
        except UnsupportedError:
            continue
        assert_reads_arguments_alone(op, plan)
        step = op.plan(replace(problem, written=frozenset(specs)), device)
        assert not any(read_early(launch) for launch in step.launches)


def read_early(launch: Launch) -> set[str]:
    """The arrays that its kernel reads before it waits."""
    pointers = READ_EARLY.get(launch.name, {}) if launch.waits else {}
    # There is no EXTRA.HAS_LENGTHS without EXTRA.
    return {launch.pointers[name] for name, flag in pointers.items() if not flag or launch.constants.get(flag)}


def assert_reads_arguments_alone(op: Op, plan: Plan) -> None:
    """Assert that nothing is read early which the call still updates, until a launch that takes its turn."""
    others = {*plan.buffers, *op.mutates}
    for launch in plan.active[1:]:
        assert read_early(launch).isdisjoint(others)
        if not launch.waits:
            others -= {*op.mutates}


@pytest.mark.parametrize("context", [32768, 2048])
@pytest.mark.parametrize("requests", [1, 64])
def test_a_step_has_two_launches_less_than_its_ops(requests: int, context: int) -> None:
    """And the one that writes has ended before any other reads a cache; no launch more takes its turn than without."""
    calls = list(ModelConfig().decode(requests, 1, context))
    *apart, attention, step = (call.plan(H200) for call in calls)
    assert [call.op for call in calls] == ["write_mla_cache", "write_indexer_cache", "dsa_attention", "dsa_step"]
    launches = [launch for plan in (*apart, attention) for launch in plan.active]
    quantised = launches[2].name == "quantize_indexer_query_kernel"
    assert len(step.active) == len(launches) - (2 if quantised else 1)
    assert [launch.kernel for launch in step.active[1:]] == [
        launch.kernel for launch in launches[3 - (not quantised) :]
    ]
    if context > 2048:  # logits, which begin early
        assert step.active[1].constants["KEYS_EARLY"] is False
    assert [launch.waits for launch in step.active[:3]] == [True, context > 2048, True]
    assert all(launch.waits for launch in step.active[2:])
    assert step.active[0].grid[0] == sum(launch.grid[0] for launch in launches[: 2 + quantised])
    assert_reads_arguments_alone(registry()["dsa_step"], step)


def test_launches_that_spread_start_beside_any_number_of_programs() -> None:
    """Logits, and attention, of which an SM holds one program; neither the selection nor what combines splits."""
    *_, step = (call.plan(H200) for call in ModelConfig().decode(32, 1, 32768))
    limits = {after.name: before.constants["OVERLAP_LIMIT"] for before, after in pairwise(step.active)}
    assert limits == {
        "indexer_logits_paged_sm90_kernel": LARGEST_SIZE,
        "select_slots_cluster_sm90_kernel": H200.overlap_limit,
        "sparse_mla_sm90_kernel": LARGEST_SIZE,
        "combine_splits_kernel": H200.overlap_limit,
    }


def test_a_selection_alone_starts_early() -> None:
    """It waits before it reads; in a step it reads the lengths of rows sooner, and the first launch takes its turn."""
    op = registry()["select_topk"]
    for columns in (8192, 65536):
        specs = Spec((1, columns), "float32"), Spec((1,), "int32"), None
        (launch,) = plan_call(op, specs, op.attributes(k=2048), H200)[0].launches
        assert launch.starts_early(first=True)
        assert not launch.in_turn().starts_early(first=True)
    *_, step = (call.plan(H200) for call in ModelConfig().decode(1, 1, 32768))
    (selection,) = (launch for launch in step.active if launch.name == "select_slots_cluster_sm90_kernel")
    assert selection.starts_early(first=False)
    assert not any(launch.starts_early(first=True) for launch in step.active)


def test_what_starts_early_is_the_only_launch_of_its_call() -> None:
    """One after it might read the call's arguments before what wrote them has ended (core/lang/launches.py)."""
    counts = set()
    for op in registry().values():
        for case in op.cases:
            launches = kit.plan_of(op, case, H200).active
            if any(launch.starts_early(first=True) for launch in launches):
                counts.add(len(launches))
    assert counts == {1}


def test_launches_take_turns_where_nothing_waits() -> None:
    """Before Hopper, in the interpreter, and where a kernel does not wait."""
    ops = registry()
    op = ops["dsa_attention"]
    for device in (INTERPRETER, *KNOWN_DEVICES):
        waiting = {launch.waits for launch in kit.plan_of(op, op.cases[0], device).launches}
        assert waiting == {device.arch >= 90}, device
    assert not any(
        launch.waits for launch in kit.plan_of(ops["split_batch"], ops["split_batch"].cases[0], H200).launches
    )


def attention(
    tokens: int, heads: int, k: int, device: Device, padding: int = 0, lengths: bool = False, **attrs: object
) -> Plan:
    """The plan of attention over 656-byte entries, with so many bytes between pages."""
    op = registry()["sparse_mla"]
    specs = {
        "q": Spec((tokens, heads, 576), "bfloat16"),
        "cache": Spec((1000, 64, 656), "uint8", (64 * 656 + padding, 656, 1)),
        "slots": Spec((tokens, k), "int32"),
    }
    if lengths:
        specs["lengths"] = Spec((tokens,), "int32")
    values = op.attributes(**{"softmax_scale": 1.0} | attrs)
    return plan_call(op, tuple(specs.get(n) for n in op.tensors), values, device)[0]


def splits(plan: Plan) -> int:
    return plan.buffers["split_out"].shape[1] if "split_out" in plan.buffers else 1


def test_few_tokens_are_split_over_the_keys_and_many_are_not() -> None:
    assert splits(attention(1, 128, 2048, H200)) >= 8
    assert splits(attention(4096, 128, 2048, H200)) == 1
    assert splits(attention(4096, 128, 2048, RTX_PRO_6000)) == 1


@pytest.mark.parametrize(
    ("tokens", "heads", "attrs", "unpacks"),
    [
        (2000, 128, {}, {H200}),  # on SM12x converted beside the products at no cost, as are those of 17
        (1999, 128, {}, set()),
        (4096, 17, {}, {H200}),
        (4096, 16, {}, {RTX_PRO_6000}),  # likewise on Hopper
        (4096, 128, {"batch_invariant": True}, set()),  # bits must not depend on how many tokens there are
    ],
)
def test_entries_are_unpacked_once_where_many_tokens_name_them(
    tokens: int, heads: int, attrs: dict[str, object], unpacks: set[Device]
) -> None:
    k = 1024  # of 64000 entries
    for device in (H200, RTX_PRO_6000, GB10, B200):
        plan = attention(tokens, heads, k, device, **attrs)
        assert ("rows" in plan.buffers) == (device in unpacks), device
        assert device not in unpacks or plan.workspace_bytes <= 37 * tokens * k


@pytest.mark.parametrize("mib", [160, 512, 2048])
@pytest.mark.parametrize("selected", [None, 2048])
def test_the_indexers_loss_over_131072_tokens_stays_within_its_bound(selected: int | None, mib: int) -> None:
    tokens, dims = 131072, 576
    specs = {
        "index_q": Spec((tokens, 64, 128), "bfloat16"), "index_k": Spec((tokens, 128), "bfloat16"),
        "index_weights": Spec((tokens, 64), "float32"), "q": Spec((tokens, 128, dims), "bfloat16"),
        "rows": Spec((tokens, dims), "bfloat16"), "lse": Spec((tokens, 128), "float32"),
        "ends": Spec((tokens,), "int32"), "starts": Spec((tokens,), "int32"),
    } | ({"indices": Spec((tokens, selected), "int32")} if selected else {})  # fmt: skip
    plan = Call("indexer_loss", specs, {"softmax_scale": 1.0, "workspace_bytes": mib << 20}).plan(H200)
    assert 100 << 20 < plan.workspace_bytes <= mib << 20
    assert all(spec.nbytes <= mib << 20 for name, spec in plan.buffers.items() if name not in plan.results)


@pytest.mark.parametrize("layout", [(8192, 576), (8192, 512)], ids=str)
@pytest.mark.parametrize("device", [H200, RTX_PRO_6000], ids=lambda device: device.name)
def test_attentions_derivative_needs_less_than_256_mib_beside_8192_entries(
    layout: tuple[int, int], device: Device
) -> None:
    (tokens, dims), heads = layout, 128
    values = Spec((tokens, heads, 512), "bfloat16")
    specs = {
        "q": Spec((tokens, heads, dims), "bfloat16"), "cache": Spec((tokens, 1, dims), "bfloat16"),
        "slots": Spec((tokens, 2048), "int32"), "forward_out": values, "forward_lse": Spec((tokens, heads), "float32"),
        "dout": values,
    }  # fmt: skip
    plan = Call("sparse_mla_backward", specs, {"softmax_scale": 1.0}).plan(device)
    assert 8192 * dims * 8 <= plan.workspace_bytes <= 256 << 20


def selection(tokens: int, keys: int, mib: int, implementation: str | None = None) -> Plan:
    op = registry()["indexer_topk"]
    specs = {
        "q8": Spec((tokens, 64, 128), "float8_e4m3fn"), "weights": Spec((tokens, 64), "float32"),
        "keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32"),
        "starts": Spec((tokens,), "int32"), "ends": Spec((tokens,), "int32"),
    }  # fmt: skip
    attrs = op.attributes(k=2048, workspace_bytes=mib << 20)
    plan = plan_call(op, tuple(specs[name] for name in op.tensors), attrs, H200, implementation)[0]
    assert plan.workspace_bytes <= mib << 20
    return plan


@NEEDS_INLINE_PTX
@pytest.mark.parametrize(
    ("tokens", "keys", "mib", "implementation", "most"),
    [(2048, 65536, 64, None, 256), (2048, 65536, 64, "triton", 192), (2000, 65536, 512, None, 2000),
     (130, 65536, 25, "triton", 64), (8192, 1 << 20, 64, None, 10)],
)  # fmt: skip
def test_stored_logits_of_as_many_tokens_as_fit(
    tokens: int, keys: int, mib: int, implementation: str | None, most: int
) -> None:
    """In parts of whole programs of the logits' kernel."""
    plan = selection(tokens, keys, mib, implementation)
    firsts = range(0, tokens, most)
    counts = [min(most, tokens - first) for first in firsts]
    logits = [launch for launch in plan.launches if "logits" in launch.writes]
    rows = [(launch.sizes["first_row"], launch.sizes["num_tokens"]) for launch in logits]
    assert rows == list(zip(firsts, counts, strict=True))
    select = [launch for launch in plan.launches if "indices" in launch.writes]
    assert [(launch.sizes["first_row"], launch.grid) for launch in select] == [
        (f, (n,)) for f, n in zip(firsts, counts, strict=True)
    ]


@pytest.mark.parametrize(
    ("tokens", "keys", "mib", "implementation"),
    [(8192, 1 << 20, 64, "triton"), (32768, 1 << 20, 64, None), (130, 8000, 1, None)],
    ids=["too few tokens per program", "too many parts", "parts too small"],
)
def test_no_logits_are_stored_where_parts_would_not_pay(
    tokens: int, keys: int, mib: int, implementation: str | None
) -> None:
    assert [launch.name for launch in selection(tokens, keys, mib, implementation).launches] == ["indexer_topk_kernel"]


def select_within(tokens: int, keys: int) -> dict[str, Spec]:
    """Specs of a call that selects in 2048 blocks."""
    return {
        "q8": Spec((tokens, 32, 128), "float8_e4m3fn"), "weights": Spec((tokens, 32), "float32"),
        "keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32"),
        "starts": Spec((tokens,), "int32"), "ends": Spec((tokens,), "int32"),
        "blocks": Spec((tokens, 2048), "int32"),
    }  # fmt: skip


def within_blocks(tokens: int, keys: int, device: Device = H200, mib: int = 512) -> list[Launch]:
    attrs = {"k": 512, "granularity": 8, "workspace_bytes": mib << 20}
    plan = Call("indexer_block_topk", select_within(tokens, keys), attrs).plan(device)
    assert plan.workspace_bytes <= mib << 20
    return [launch for launch in plan.launches if "logits" in launch.writes]


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize(
    ("device", "keys", "kernel"),
    [(H200, 32768, "logits_at_places_sm90"), (H200, 32769, "indexer_block_logits_sm90"),
     (B200, 16384, "logits_at_places"), (B200, 16385, "indexer_block_logits"),
     (RTX_PRO_6000, 16384, "logits_at_places")],
)  # fmt: skip
def test_a_selection_in_blocks_scores_whole_ranges_of_few_more_keys(
    device: Device, keys: int, kernel: str, tokens: int
) -> None:
    """Whatever the tokens: a row's kernels do not follow how many there are beside it."""
    names = [launch.name.removesuffix("_kernel") for launch in within_blocks(tokens, keys, device)]
    ranges = ["block_places", kernel, "repeat_logits"]
    assert names == ([kernel] if kernel.startswith("indexer_block_logits") else ranges)


def test_without_room_for_a_program_of_whole_ranges_tokens_read_their_own_blocks() -> None:
    op, specs = registry()["indexer_block_topk"], select_within(64, 32768)
    arrays, attrs = (
        tuple(specs[name] for name in op.tensors),
        op.attributes(k=512, granularity=8, workspace_bytes=200_000),
    )
    plan, _ = plan_call(op, arrays, attrs, H200)
    assert {launch.name for launch in plan.launches if "logits" in launch.writes} == {"indexer_block_logits_kernel"}
    got = (
        "'gluon' where the logits of 4 tokens do not fit workspace_bytes, supported: 'triton', or more workspace_bytes"
    )
    with pytest.raises(UnsupportedError, match=f"indexer_block_topk: implementation value is {got}$"):
        plan_call(op, arrays, attrs, H200, "gluon")


def test_whole_ranges_are_scored_in_parts_of_whole_programs() -> None:
    logits = [launch for launch in within_blocks(4096, 32768, mib=128) if launch.name.startswith("logits_at")]
    counts = [launch.sizes["num_tokens"] for launch in logits]
    assert sum(counts) == 4096 and len(counts) > 1 and not any(count % 4 for count in counts)
    assert [launch.sizes["first_row"] for launch in logits] == [sum(counts[:i]) for i in range(len(counts))]


MODELS = (ModelConfig, ModelConfigV4, ModelConfigV41, ModelConfigGlmFlash, ModelConfigMistralLarge4)


def test_integers_of_a_call_begin_on_16_bytes_or_count_as_if_none_did() -> None:
    """So that one kernel serves any of them; rows of whole vectors are read as such wherever the others begin."""
    shapes = {"indices": (8, 2048), "block_table": (3, 20), "request_ids": (8,)}
    specs = {name: Spec(shape, "int32") for name, shape in shapes.items()}
    for aligned in product((16, 8, 4), repeat=2):
        places = dict(zip(("block_table", "request_ids"), aligned, strict=True))
        moved = specs | {name: replace(specs[name], alignment=place) for name, place in places.items()}
        (kernel,) = Call("map_slots", moved, {"page_size": 64}).specializations(H200)
        assert kernel.unaligned == (set() if aligned == (16, 16) else {"block_table_ptr", "request_ids_ptr"})
    odd = specs | {"indices": Spec((8, 2048), "int32", alignment=4)}
    (kernel,) = Call("map_slots", odd, {"page_size": 64}).specializations(H200)
    assert kernel.unaligned == {"indices_ptr", "lengths_ptr"}, "the indices stand in for lengths"


@pytest.mark.parametrize("device", [H200, B200, GB10], ids=lambda device: device.name)
@pytest.mark.parametrize("mixed", [False, True])
def test_ranks_that_store_logits_in_parts_launch_no_other_kernel(mixed: bool, device: Device) -> None:
    """As `ContextParallel.select` does, which then names each token's request."""
    config = ModelConfig(ranks=2, batches=(300,), max_lens=(1 << 20,), mixed=mixed, prefill_tokens=())
    listed, columns = set(config.specializations(device)), 1 << 19
    most = (1 << 29) // (4 * columns)
    for count in (most, 300 % most):
        rows = Spec((count,), "int32")
        scored = {
            "q8": Spec((count, 64, 128), "float8_e4m3fn"), "weights": Spec((count, 64), "float32"),
            "cache": Spec((1024, 64, 132), "uint8"), "block_table": Spec((300, columns // 64), "int32"),
            "lengths": rows, "request_ids": rows,
        }  # fmt: skip
        selected = {"logits": Spec((count, columns), "float32"), "ends": rows}
        for call in (Call("indexer_logits_paged", scored, {}), Call("select_topk", selected, {"k": 2048})):
            assert set(call.specializations(device)) <= listed, (call.op, count)


def test_ranks_that_each_merge_their_own_heads_launch_no_other_kernel() -> None:
    config = ModelConfig(ranks=4, heads=64, sink=True, batches=(3,), max_lens=(5000,), next_n=(1, 3), prefill_tokens=())
    listed = set(config.specializations(H200))
    for tokens in (3, 9):
        part = tokens * 16 * (1024 + 4)  # of a rank: rows in bfloat16, then float32 lses
        outs = Spec((4, tokens, 16, 512), "bfloat16", (part // 2, 16 * 512, 512, 1))
        lses = Spec((4, tokens, 16), "float32", (part // 4, 16, 1))
        merge = Call("merge_attention", {"outs": outs, "lses": lses, "sink": Spec((16,), "float32")}, {})
        assert set(merge.specializations(H200)) <= listed


@pytest.mark.parametrize("model", MODELS)
def test_the_slots_of_new_tokens_are_listed(model: type[Model]) -> None:
    """As an engine's step finds them: a position of each token, in pages of any cache."""
    config = model(batches=(3,), max_lens=(5000,), prefill_tokens=())
    listed = set(config.specializations(H200))
    for page in {spec.shape[1] for spec in config.caches().values()}:
        for tokens, ids in product((1, 75), (True, False)):
            specs = {"indices": Spec((tokens, 1), "int32"), "block_table": Spec((tokens, 79), "int32")}
            specs |= {"request_ids": Spec((tokens,), "int32")} if ids else {}
            assert set(Call("map_slots", specs, {"page_size": page}).specializations(H200)) <= listed


def test_what_several_launches_write_comes_first() -> None:
    op = registry()["sparse_mla_backward"]
    plan = kit.plan_of(op, op.cases[0], H200)
    clear, count = plan.launches[:2]
    assert "references" in plan.shared and clear.writes == count.writes == ("references",)
    combine = attention(1, 128, 2048, H200).launches[1]
    buffers = dict.fromkeys(("out", "lse"), plan.buffers["references"])
    with pytest.raises(RuntimeError, match="come first"):
        Plan((combine, replace(clear, arrays={"cleared": "lse"})), buffers, ())


def test_a_swapped_launch_is_refused() -> None:
    """Arrays and sizes of one dtype cannot change places: each goes to the parameter with its name."""
    right = {
        "grid": (2,),
        "outputs": ("slots", "counts"),
        "arrays": {"request_ids": "indices", "lengths": "indices"},
        "sizes": {
            "num_keys": 8,
            "index_stride": 8,
            "num_requests": 2,
            "table_stride": 4,
            "table_width": 4,
            "next_n": 1,
        },
        "constexprs": dict.fromkeys(("UNIT", "MAPPING", "OVERLAP_LIMIT"), 1),
    }
    assert Launch(map_slots_kernel, **right).reads == ("indices", "block_table", "indices", "indices")
    for wrong, message in (
        ({"arrays": {"indices": "block_table", "block_table": "indices"}}, "indices_ptr gets block_table"),
        ({"arrays": {"tables": "block_table"}}, "unknown: ['tables']"),
        ({"outputs": ("counts", "slots")}, "map_slots_kernel takes"),
        ({"outputs": ("slots",)}, "map_slots_kernel takes"),
        ({"sizes": {"num_requests": 1, "next_n": 1, "table_width": 4}}, "map_slots_kernel takes"),
        ({"sizes": {**right["sizes"], "rows": 3}}, "unknown: ['rows']"),
        ({"constexprs": {**right["constexprs"], "num_requests": 1}}, "map_slots_kernel takes"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(message)):
            Launch(map_slots_kernel, **right | wrong)


def specialization(extra: bool, page_size: int = 64) -> Specialization:
    """The kernel of attention over one source, or over a second one beside it."""
    cache, slots = Spec((8, page_size, 584), "uint8"), Spec((3, 40), "int32")
    specs = {"q": Spec((3, 64, 512), "bfloat16"), "cache": cache, "slots": slots}
    specs |= {"extra_cache": cache, "extra_slots": slots} if extra else {}
    plan = Call("sparse_mla", specs, {"softmax_scale": 1.0}).plan(H200)
    return specialize(plan.launches[0], plan, specs)


def test_what_a_kernel_is_compiled_for_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants in an object, too, and those of an object that the other kernel has not."""
    one, two, smaller = specialization(False), specialization(True), specialization(True, 32)
    assert one.facts()["EXTRA"] is None and two.facts()["EXTRA.PAGE_SIZE"] == 64
    monkeypatch.setitem(compile._facts, two.kernel, [two.facts()])
    size, stride = (64, 32), (64 * 584, 32 * 584)
    assert compile._news(smaller.kernel, smaller.facts()) == {
        "SOURCE.PAGE_STRIDE": stride, "SOURCE.PAGE_SIZE": size, "EXTRA.PAGE_STRIDE": stride, "EXTRA.PAGE_SIZE": size,
    }  # fmt: skip
    assert compile._news(one.kernel, one.facts())["EXTRA.LAYOUT"] == (V4, None)
    assert "SOURCE.PAGE_SIZE=64, SOURCE.HAS_LENGTHS=False, EXTRA=None" in str(one)


@pytest.mark.parametrize("plan", ["attention", "selection"])
def test_a_launch_in_turn_waits_for_nothing(plan: str) -> None:
    """Whether a kernel takes its constants one by one or as an object."""
    launch = (
        attention(1, 128, 2048, H200).launches[-1] if plan == "attention" else selection(130, 8000, 64).launches[-1]
    )
    assert launch.waits and not launch.in_turn().waits
    assert {**launch.constants, "OVERLAP_LIMIT": 0} == launch.in_turn().constants


@pytest.mark.parametrize(
    ("heads", "padding", "invariant", "tile"),
    [(16, 0, False, 16), (1, 16, False, 16), (17, 0, False, 64), (16, 4, False, 64), (16, 0, True, 64)],
)
def test_few_heads_have_a_tile_of_their_own_on_hopper(heads: int, padding: int, invariant: bool, tile: int) -> None:
    plan = attention(64, heads, 2048, H200, padding, batch_invariant=invariant)
    assert plan.launches[0].constants["BLOCK_H"] == tile


@pytest.mark.parametrize(
    ("heads", "keys", "entries", "deterministic", "together"),
    [
        (1, LEAST_KEYS, 4096, True, True),
        (1, LEAST_KEYS - 1, 4096, True, False),
        (FEW_HEADS, 2**15 - 1, 1 << 17, True, True),
        (FEW_HEADS + 1, 2048, 4096, True, False),
        (FEW_HEADS, 2**15, 1 << 17, True, False),  # counts of 15 bits
        (FEW_HEADS, 2048, (1 << 17) + 1, True, False),
        (FEW_HEADS, 2048, 4096, False, False),
    ],
)
@pytest.mark.parametrize("tokens", [0, 1, 4096])
def test_tokens_with_few_heads_add_to_entries_together(
    tokens: int, heads: int, keys: int, entries: int, deterministic: bool, together: bool
) -> None:
    """Whatever the number of tokens: the order of a token's keys, and so the bits of dq, do not depend on it."""
    values = Spec((tokens, heads, 512), "bfloat16")
    specs = {
        "q": Spec((tokens, heads, 576), "bfloat16"), "cache": Spec((entries, 1, 576), "bfloat16"),
        "slots": Spec((tokens, keys), "int32"), "forward_out": values,
        "forward_lse": Spec((tokens, heads), "float32"), "dout": values,
    }  # fmt: skip
    plan = Call("sparse_mla_backward", specs, {"softmax_scale": 1.0, "deterministic": deterministic}).plan(H200)
    names = [launch.name for launch in plan.launches]
    assert ("merge_slots_kernel" in names) == together != ("order_slots_kernel" in names)
    if together:
        of_queries = [launch.grid[0] for launch in plan.launches if launch.name == "sparse_mla_backward_dq_sm90_kernel"]
        assert sum(of_queries) == tokens
        assert plan.buffers["factors"].nbytes <= FACTORS_BYTES


@pytest.mark.parametrize(
    ("tokens", "heads", "lengths", "places"),
    [
        (67, 128, True, 128),
        (67, 128, False, 0),  # all have K keys
        (66, 128, True, 0),  # 132 programs, which all start at once
        (133, 64, True, 256),
        (512, 128, True, 512),
        (513, 128, True, 0),
        (264, 16, True, 0),  # two programs an SM
        (265, 16, True, 512),
    ],
)
def test_tokens_with_most_keys_come_first_on_hopper(tokens: int, heads: int, lengths: bool, places: int) -> None:
    assert attention(tokens, heads, 2048, H200, lengths=lengths).launches[0].constants["PLACES"] == places


def test_batch_invariant_splits_depend_on_k_alone() -> None:
    counts = {splits(attention(t, 128, 2048, H200, batch_invariant=True)) for t in (1, 7, 64, 4096)}
    assert len(counts) == 1
    assert splits(attention(3, 16, 100, RTX_PRO_6000, batch_invariant=True)) == 1


@pytest.mark.parametrize("k", [2048, 8192])
@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_with_batch_invariant_the_order_of_additions_follows_neither_rows_nor_heads(device: Device, k: int) -> None:
    """It follows tiles and warps, which share the keys or splits of a row."""

    def kernels(tokens: int, heads: int) -> list[object]:
        plan = attention(tokens, heads, k, device, batch_invariant=True)
        of_shape = {"HEADS", "Q_STRIDE_T", "ORDERED"}  # which row, not how it is computed
        return [
            (launch.kernel, launch.num_warps, {n: v for n, v in launch.constants.items() if n not in of_shape})
            for launch in plan.launches
        ]

    expected = kernels(1, 1)
    for tokens in (1, 7, 64, 512, 4096):
        for heads in (1, 16, 64, 128):
            assert kernels(tokens, heads) == expected, (tokens, heads)


@pytest.mark.parametrize(("tokens", "heads", "parts"), [(1, 16, 4), (2, 16, 4), (3, 16, 1), (1, 64, 1), (1, 128, 1)])
def test_few_heads_are_combined_by_several_programs_each(tokens: int, heads: int, parts: int) -> None:
    combine = attention(tokens, heads, 2048, H200).launches[-1]
    assert combine.constants["PARTS"] == parts and combine.grid == (tokens * heads * parts,)


@pytest.mark.parametrize("device", [H200, B200], ids=lambda device: device.name)
@pytest.mark.parametrize(("op", "case"), kit.all_cases(), ids=kit.case_id)
def test_a_plan_writes_the_results_that_its_op_declares(op: Op, case: Case, device: Device) -> None:
    """A kernel is compiled for the plan's dtypes: for another than the result's it would write beside or past it."""
    given = {name: Spec.of_numpy(array) for name, array in case.make(np.random.default_rng(0)).items()}
    problem = op.bind(given, op.attributes(**case.attrs))
    plan = op.plan(problem, device)
    assert {name: plan.buffers[name] for name in plan.results} == dict(problem.results)


def test_the_memo_does_not_take_true_for_one() -> None:
    op = registry()["select_topk"]
    specs = (Spec((3, 77), "float32"), Spec((3,), "int32"), None)
    assert plan_call(op, specs, op.attributes(k=1), H200)[0].results == ("indices",)
    with pytest.raises(ArgumentError, match="select_topk: k type is bool, expected int"):
        plan_call(op, specs, op.attributes(k=True), H200)


@pytest.mark.parametrize("device", [H200, RTX_PRO_6000], ids=lambda device: device.name)
def test_no_kernel_divides_by_the_size_of_pages_without_entries(device: Device) -> None:
    """The compiler may do anything with a division by a constant 0: masks were dropped, an H200 met a wrong address."""
    planned = set()
    for op in registry().values():
        case = kit.smallest(op)
        inputs = kit.make(case)
        for cache in (name for name in op.pools if name in inputs and op.tensors[name].format is not None):
            cut = kit.with_axis(op, inputs, op.tensors[cache].names[1], 0)
            specs = {name: Spec.of_numpy(array) for name, array in cut.items()}
            try:
                plan = op.plan(op.bind(specs, op.attributes(**case.attrs)), device)
            except ArgumentError:
                continue
            for launch in plan.launches:
                sizes = {name: value for name, value in launch.constants.items() if name.endswith("PAGE_SIZE")}
                assert all(sizes.values()), (launch.name, sizes)
                planned |= {op.name} if sizes else set()
    assert len(planned) > 15, planned


def test_workspace_is_known_up_front() -> None:
    plan = attention(2, 128, 2048, H200)
    row = 512 * 2 + (1 + 2) * 4  # float16, the lse and two powers of two
    assert plan.workspace_bytes == 2 * splits(plan) * 128 * row and plan.workspace_bytes % 256 == 0


def test_reference_agrees_with_loops_over_keys() -> None:
    """The references themselves, against formulations that take one key at a time."""
    ops = registry()
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((4, 50)) * 2).astype(np.float32)
    logits[0, 3], logits[1, 4], logits[2, :9] = np.nan, -np.inf, -0.0
    ends = np.array([50, 7, 33, 0], np.int32)
    (got,) = ops["select_topk"].reference(logits, ends, k=8)
    for row, end in enumerate(ends):
        ranked = sorted(range(end), key=lambda c: (np.isnan(logits[row, c]), -np.nan_to_num(logits[row, c]) + 0.0, c))
        assert [c for c in got[row] if c >= 0] == sorted(ranked[:8])

    op = ops["sparse_mla"]
    inputs = kit.make(op.cases[2])
    attrs = kit.attributes(op, op.cases[2])
    out, lse = op.reference(**inputs, **attrs)
    cache = inputs["cache"]
    total_slots = cache.shape[0] * cache.shape[1]
    from xmla.core.formats.mla import V32

    for token in range(len(out)):
        total, value = np.zeros(out.shape[1]), np.zeros(out.shape[1:])
        for place, slot in enumerate(inputs["slots"][token]):
            if place < inputs["lengths"][token] and 0 <= slot < total_slots:
                key = V32.gather(cache, np.array([slot]))[0].astype(np.float64)
                weight = np.exp(inputs["q"][token].astype(np.float64) @ key * attrs["softmax_scale"])
                total, value = total + weight, value + weight[:, None] * key[:512]
        if total.any():
            assert np.allclose(out[token], value / total[:, None]) and np.allclose(lse[token], np.log(total))
        else:
            assert not out[token].any() and np.isposinf(lse[token]).all()


def test_pointers_beside_16_bytes_are_told_to_the_compiler() -> None:
    specs = {
        "q": Spec((3, 16, 576), "bfloat16", alignment=8), "cache": Spec((9, 64, 656), "uint8", alignment=4),
        "slots": Spec((3, 2048), "int32"),
    }  # fmt: skip
    plan = Call("sparse_mla", specs, {"softmax_scale": 0.1}).plan(H200)
    attend, combine = (specialize(launch, plan, specs).unaligned for launch in plan.launches)
    assert attend == {"q_ptr", "cache_ptr", "extra_cache_ptr"}, "the cache stands in for the second source's"
    assert not combine, "results and workspace are aligned"


def test_the_stride_of_a_single_row_is_of_no_matter() -> None:
    """Views of one token or page come with any: [1, 4, 576] of a [4, 1, 576], transposed, has (576, 576, 1)."""
    op = registry()["sparse_mla"]
    attrs = op.attributes(softmax_scale=0.1)
    given = {"cache": Spec((1, 64, 656), "uint8", (99, 656, 1)), "slots": Spec((1, 64), "int32", (1, 1))}
    plans = []
    for strides in ((576, 576, 1), (2304, 576, 1), None):
        specs = {"q": Spec((1, 4, 576), "bfloat16", strides), **given}
        plans.append(plan_call(op, tuple(specs.get(name) for name in op.tensors), attrs, H200)[0])
    assert plans[0] == plans[1] == plans[2]
    assert plans[0].launches[0].constants["Q_STRIDE_T"] == 2304
    assert plans[0].launches[0].constants["SOURCE.PAGE_STRIDE"] == 64 * 656


@pytest.mark.parametrize("model", MODELS)
def test_fields_of_a_model(model: type[Model]) -> None:
    """Each is of its type, or an error that names it; NumPy's numbers and lists are taken."""
    for field, value, got, expected in (
        ("batches", 3, "int", "a tuple of int"),
        ("batches", (1, 2.5), "float", "int"),
        ("next_n", "1", "str", "a tuple of int"),
        ("heads", 16.0, "float", "int"),
        ("heads", None, "NoneType", "int"),
        ("mixed", 1, "int", "bool"),
        ("index_format", 4, "int", "str"),
        ("softmax_scale", "0.1", "str", "float"),
    ):
        with pytest.raises(ArgumentError) as refused:
            model(**{field: value})
        assert str(refused.value) == f"{model.__name__}: {field} type is {got}, expected {expected}"
    for field, value, got in (
        ("batches", (1, 0), 0), ("next_n", (-2,), -2), ("max_lens", (0,), 0), ("prefill_tokens", (64, -5), -5),
        ("heads", 0, 0), ("page_size", 0, 0), ("k", -1, -1), ("workspace_bytes", 0, 0),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=rf"^{model.__name__}: {field} value is {got}, expected at least 1$"):
            model(**{field: value})
    for field in ("max_lens", "next_n"):
        with pytest.raises(ArgumentError, match=rf"^{model.__name__}: {field} is empty, expected at least one number$"):
            model(**{field: ()})
    with pytest.raises(ArgumentError, match="format is 'fp4', expected 'fp8' or 'mxfp4'"):
        model(index_format="fp4").specializations(H200)
    with pytest.raises(ArgumentError, match=r": softmax_scale value is nan, expected a finite number"):
        model(softmax_scale=float("nan"))
    assert model(batches=[1, np.int64(2)], heads=np.int32(16)) == model(batches=(1, 2), heads=16)


@pytest.mark.parametrize("model", MODELS)
def test_what_a_step_writes_and_selects_follows_the_configuration(model: type[Model]) -> None:
    """Every op of its steps that takes these attributes, the keys of an indexer apart, whose floor is always one."""
    small = model(batches=(2,), max_lens=(4096,), prefill_tokens=(64,), next_n=(1,))
    chosen = {"scale_floor": "amax", "workspace_bytes": 1 << 20}
    for name, value in chosen.items():
        calls = [call for _, step in replace(small, **{name: value}).steps() for call in step]
        takes = [call for call in calls if name in registry()[call.op].defaults]
        keys = [call for call in takes if call.op == "compress_kv" and "cache_format" not in call.attrs]
        assert takes and all(call.attrs.get(name) == (None if call in keys else value) for call in takes), name
    assert not any(call.attrs.keys() & chosen for _, step in small.steps() for call in step)


@pytest.mark.parametrize("model", [ModelConfigV4, ModelConfigV41])
@pytest.mark.parametrize("pages", [(64,), (64, 2, 2)])
def test_pages_of_entries_are_of_each_ratio(model: type[Model], pages: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=rf"^{model.__name__}: entry_pages has length {len(pages)}, expected 2$"):
        model(entry_pages=pages)
