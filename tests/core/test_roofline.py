"""The roofline against times measured on an H200, and its work against worked examples."""

import json
from pathlib import Path

import pytest

from tools.report.roofline import MODELLED, call_of, estimates
from xmla.core.plan.roofline import REACHED, seconds_of
from xmla.core.registry import registry
from xmla.core.values import H200, KNOWN_DEVICES, PEAKS, Device, Spec

ROOT = Path(__file__).parent.parent.parent
LINES = [json.loads(line) for line in (ROOT / "benchmarks/results/h200/bench.jsonl").read_text().splitlines()]


def test_no_kernel_is_faster_than_the_model() -> None:
    found = list(estimates(LINES))
    assert {estimate.op for estimate in found} == set(MODELLED)
    assert all(1 <= estimate.ratio < 13 for estimate in found), [e for e in found if not 1 <= e.ratio < 13]


def test_work_of_known_calls() -> None:
    """64 tokens × 128 heads × 2048 of 656 bytes each; 64 requests × 65536 keys of 132 bytes and a logit each."""
    call, _ = call_of("sparse_mla", "decode b=64 h=128 s_q=1 k=2048")
    op = registry()["sparse_mla"]
    prefill, _ = call_of("sparse_mla", "prefill bf16 rows s_q=4096 h=128 k=2048 s_kv=8192")
    assert op.work(op.bind(prefill.specs, op.attributes(**prefill.attrs)), None)[0].bytes == 8192 * 576 * 2
    attend, rest = op.work(op.bind(call.specs, op.attributes(**call.attrs)), None)
    assert attend.bytes == 64 * 2048 * 656 and attend.bf16_flops == 2 * 64 * 128 * 2048 * (576 + 512)
    assert rest.bytes == 64 * 128 * (576 + 512) * 2 + 64 * 2048 * 4 + 64 * 128 * 4
    call, keys = call_of("indexer_logits_paged", "b=64 next_n=2 keys=8192")
    op = registry()["indexer_logits_paged"]
    score, _ = op.work(op.bind(call.specs, op.attributes()), keys)
    assert score.bytes == 64 * 8192 * 132 + 128 * 8192 * 4 and score.fp8_flops == 2 * 128 * 8192 * 64 * 128
    assert seconds_of(score, PEAKS[H200.name]) == score.bytes / (4.8e12 * REACHED.bytes_per_s)


def test_blocks_need_no_more_than_the_largest_logit_of_each() -> None:
    """Hopper's kernel over contiguous keys writes an eighth of the logits' bytes, and the selection reads these."""
    op, tokens, keys = registry()["indexer_blocks"], 512, 4096
    problem = op.bind(
        {
            "q8": Spec((tokens, 32, 128), "float8_e4m3fn"), "weights": Spec((tokens, 32), "float32"),
            "keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32"),
            "starts": Spec((tokens,), "int32"), "ends": Spec((tokens,), "int32"),
        },
        op.attributes(k=64, granularity=8),
    )  # fmt: skip
    score, select, _ = op.work(problem, None)
    assert score.bytes == keys * 132 + select.bytes and select.bytes == tokens * keys // 8 * 4
    assert score.fp8_flops == 2 * tokens * keys * 32 * 128


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_every_known_device_has_rates(device: Device) -> None:
    call, keys = call_of("dsa_attention", "b=64 h=128 context=32768 k=2048")
    seconds, more = call.estimate(device, keys), call.estimate(device, 2 * keys)
    assert seconds is not None and more is not None and 0 < seconds < more < 2 * seconds
    assert call.estimate(Device.of("NVIDIA Unknown", 90, 10)) is None
