"""Tells what Gluon kernels of attention, its derivative, logits and selection refuse; JSON lines.

A script of its own: kernels compile only where TRITON_INTERPRET was not set when Triton was imported.
    python -m tools.wrong_constants
The planner never asks for the others. Here constants of planned launches are replaced: by every layout there is, and by
the served layouts with one field changed.
"""

import json
from collections.abc import Hashable
from dataclasses import replace

from triton.compiler.errors import CompileTimeAssertionFailure

from tools.compile_plans import DEVICES, planned
from tools.far_strides import ARCH, front_end
from xmla.core.compile import Specialization, specialize
from xmla.core.formats.mla import MLA_LAYOUTS, PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.plan.plan import with_constant
from xmla.core.values import Spec

CHANGES: dict[str, list[dict[str, object]]] = {
    "v32": [
        {"values": "e5m2"}, {"tile": 64}, {"latent": 448}, {"scale": "ue8m0"}, {"interleaved": True}, {"rope": 32},
        {"rope_values": "e4m3"}, {"row": 658}, {"rope_offset": 530}, {"scale_offset": 514},
    ],
    "nvfp4": [
        {"values": "e4m3"}, {"tile": 32}, {"latent": 448}, {"scale": "ue8m0"}, {"interleaved": False}, {"rope": 32},
        {"rope_values": "bfloat16"}, {"row": 360}, {"rope_offset": 260}, {"scale_offset": 324},
    ],
    "v4": [
        {"values": "e5m2"}, {"tile": 32}, {"latent": 384}, {"scale": "float32"}, {"footer": 16},
        {"rope_values": "quantized"}, {"row": 588}, {"row": 1096}, {"rope_offset": 456},
    ],
    "plain": [{"latent": 448}, {"rope": 32}, {"row": 580}, {"rope_offset": 516}],
}  # fmt: skip
# Of the kernel for SM12x, which serves more.
CHANGES_SM120: dict[str, list[dict[str, object]]] = {
    "v32": [
        {"values": "e2m1"}, {"tile": 64}, {"latent": 448}, {"scale": "e4m3"}, {"interleaved": True}, {"rope": 32},
        {"rope_values": "e4m3"}, {"row": 658}, {"rope_offset": 530}, {"scale_offset": 514},
    ],
    "v4": [
        {"tile": 32, "footer": 16, "row": 592}, {"scale": "float32"}, {"row": 588}, {"rope_offset": 456},
        {"rope_in_value": False, "latent": 512},
    ],
    "plain": [{"latent": 448}, {"rope": 32}, {"row": 580}, {"rope_offset": 516}],
}  # fmt: skip
# Of sm_100's, which reads an entry's scales, and 16 of its bytes, at once.
CHANGES_SM100: dict[str, list[dict[str, object]]] = {
    "v32": [
        {"values": "e2m1"}, {"tile": 64}, {"latent": 448}, {"scale": "ue8m0"}, {"interleaved": True},
        {"rope_values": "e4m3"}, {"row": 660}, {"rope_offset": 536}, {"scale_offset": 520},
    ],
    "v4": [
        {"values": "e2m1"}, {"tile": 32}, {"latent": 384}, {"scale": "float32"}, {"footer": 16, "row": 592},
        {"rope_values": "quantized"}, {"row": 588}, {"rope_offset": 456},
    ],
    "plain": [{"latent": 448}, {"row": 580}, {"rope_offset": 516}],
}  # fmt: skip


def first_launch(op: str, specs: dict[str, Spec], attrs: dict[str, object], arch: int, asked: str) -> Specialization:
    call = planned(op, "", specs, attrs, DEVICES[arch], asked)
    assert call.plan is not None, call.reason
    return specialize(call.plan.launches[0], call.plan, specs)


def launched(
    heads: int, layout: MlaLayout, extra: MlaLayout | None = None, arch: int = ARCH, asked: str = "gluon",
    pages: int = 64,
) -> Specialization:  # fmt: skip
    """The first kernel as it is planned for bf16 queries over pages of such entries."""
    slots, lengths = Spec((64, 512), "int32"), Spec((64,), "int32")
    caches = [Spec((pages, 64, row.row), "uint8" if row.packed else "bfloat16") for row in (layout, extra) if row]
    specs = {"q": Spec((64, heads, layout.dims), "bfloat16"), "cache": caches[0], "slots": slots}
    attrs: dict[str, object] = {"softmax_scale": 0.1, "cache_format": layout.name}
    if extra is not None:
        specs |= {"extra_cache": caches[1], "extra_slots": slots, "extra_lengths": lengths}
        attrs["extra_cache_format"] = extra.name
    return first_launch("sparse_mla", specs, attrs, arch, asked)


PAGED = {
    **{"q8": Spec((64, 64, 128), "float8_e4m3fn"), "weights": Spec((64, 64), "float32")},
    **{"cache": Spec((64, 64, 132), "uint8"), "block_table": Spec((16, 64), "int32")},
    "lengths": Spec((64,), "int32"),
}


def paged_logits() -> Specialization:
    """The kernel of sm_100 as it is planned for four tokens of each request."""
    return first_launch("indexer_logits_paged", PAGED, {}, 100, "gluon_sm100")


def logits_in_blocks() -> Specialization:
    """The kernel of Hopper as it is planned for blocks of 8 keys."""
    specs = PAGED | {"blocks": Spec((64, 128), "int32")}
    return first_launch("indexer_block_logits_paged", specs, {"granularity": 8}, ARCH, "gluon")


def many_rows() -> Specialization:
    """The kernel that selects in many rows as it is planned for the longest."""
    specs = {"logits": Spec((2048, 131072), "float32"), "ends": Spec((2048,), "int32")}
    return first_launch("select_topk", specs, {"k": 2048}, ARCH, "gluon_sm90")


def differentiated(layout: MlaLayout, deterministic: bool) -> Specialization:
    """The kernel of the derivative as it is planned."""
    rows = Spec((64, 64, 512), "bfloat16")
    specs = {
        **{"q": Spec((64, 64, layout.dims), "bfloat16"), "cache": Spec((64, 64, layout.row), "bfloat16")},
        **{"slots": Spec((64, 512), "int32"), "forward_out": rows, "forward_lse": Spec((64, 64), "float32")},
        "dout": rows,
    }
    attrs = {"softmax_scale": 0.1, "cache_format": layout.name, "deterministic": deterministic}
    call = planned("sparse_mla_backward", "", specs, attrs, DEVICES[ARCH], "gluon")
    assert call.plan is not None, call.reason
    (launch,) = (launch for launch in call.plan.launches if launch.name.endswith("_sm90_kernel"))
    return specialize(launch, call.plan, specs)


def refusal(launch: Specialization, name: str, value: Hashable) -> str | None:
    """The message of the `static_assert` that the kernel fails with this constant; None if it compiles."""
    constexprs = with_constant(dict(launch.constexprs), name, value)
    try:
        front_end(replace(launch, constexprs=tuple(constexprs.items())))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(cause, CompileTimeAssertionFailure):
            raise
        return str(cause.error_message)
    return None


def main() -> None:
    few, two = launched(16, V32), launched(64, V4, V4)
    of_any_layout = {
        "16 heads": few, "derivative": differentiated(PLAIN, True), "in any order": differentiated(PLAIN, False)
    }  # fmt: skip
    sm12x, two_rows = launched(64, V32, arch=120), launched(64, PLAIN_V4, PLAIN_V4, 100, "gluon_sm100")
    rows = launched(64, PLAIN_V4, None, 100, "gluon_sm100")
    kernels = [  # which changes they refuse, those over packed layouts and over plain ones
        (CHANGES, {"64 heads": launched(64, V32), **of_any_layout}, {"64 heads": launched(64, PLAIN), **of_any_layout}),
        (CHANGES_SM120, {"SM12x": sm12x}, {"SM12x": launched(64, PLAIN, arch=120)}),
        (CHANGES_SM100, {"sm_100": launched(64, V32, None, 100, "gluon_sm100")}, {"sm_100": rows}),
    ]
    for changes, of_packed, of_plain in kernels:
        for layout in MLA_LAYOUTS:
            for change in ({}, *changes.get(layout.name, ())):
                value = replace(layout, **change)
                for of, launch in (of_packed if value.packed else of_plain).items():
                    refused = refusal(launch, "SOURCE.LAYOUT", value)
                    print(
                        json.dumps({"of": of, "layout": layout.name, "change": change, "refusal": refused}), flush=True
                    )
    others: list[tuple[str, Specialization, str, Hashable]] = [
        ("64 heads of SM12x", sm12x, "BLOCK_H", 64),
        ("32 heads of sm_100", rows, "BLOCK_H", 32),
        ("another second layout on sm_100", two_rows, "EXTRA.LAYOUT", PLAIN),
        ("eight tokens of sm_100's logits", paged_logits(), "GROUP", 8),
        ("small pages of sm_100's logits", paged_logits(), "PAGES.PAGE_SIZE", 32),
        ("small pages of logits in blocks", logits_in_blocks(), "PAGES.PAGE_SIZE", 4),
        ("logits in small blocks", logits_in_blocks(), "GRANULARITY", 4),
        ("32 heads", launched(64, V32), "BLOCK_H", 32),
        ("another second layout", two, "EXTRA.LAYOUT", V32),
        ("few heads of two sources", two, "BLOCK_H", 16),
        ("a selection of 262144 columns", many_rows(), "WORDS", 1 << 13),
        ("a map of marks of 8 KB", launched(64, V32, pages=8), "MAP", 1 << 13),
    ]
    for other, launch, name, value in others:
        print(json.dumps({"other": other, "refusal": refusal(launch, name, value)}), flush=True)


if __name__ == "__main__":
    main()
