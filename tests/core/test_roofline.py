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
    rows = op.work(op.bind(prefill.specs, op.attributes(**prefill.attrs)), None)
    assert rows.bytes == 8192 * 576 * 2 + 4096 * 128 * (576 + 512) * 2 + 4096 * 2048 * 4 + 4096 * 128 * 4
    attend = op.work(op.bind(call.specs, op.attributes(**call.attrs)), None)
    assert attend.bf16_flops == 2 * 64 * 128 * 2048 * (576 + 512)
    assert attend.bytes == 64 * 2048 * 656 + 64 * 128 * (576 + 512) * 2 + 64 * 2048 * 4 + 64 * 128 * 4
    call, keys = call_of("indexer_logits_paged", "b=64 next_n=2 keys=8192")
    op = registry()["indexer_logits_paged"]
    score = op.work(op.bind(call.specs, op.attributes()), keys)
    others = 128 * 64 * (128 + 4) + 64 * 1024 * 4 + 128 * 4
    assert score.bytes == 64 * 8192 * 132 + 128 * 8192 * 4 + others and score.fp8_flops == 2 * 128 * 8192 * 64 * 128
    assert seconds_of(score, PEAKS[H200.name]) == score.bytes / (4.8e12 * REACHED.bytes_per_s)


def test_causal_logits_are_of_the_keys_that_tokens_see() -> None:
    call, keys = call_of("indexer_logits", "i=64 s_q=2048 s_kv=8192 causal")
    assert keys == sum(range(8192 - 2047, 8192 + 1)) / 2048
    op = registry()["indexer_logits"]
    assert op.work(op.bind(call.specs, op.attributes()), keys).fp8_flops == 2 * 2048 * keys * 64 * 128


def test_rows_of_fewer_bytes_are_less_work() -> None:
    """Keys in MXFP4 have 68 bytes where those in fp8 have 132."""
    call, keys = call_of("indexer_logits_paged", "b=64 next_n=2 keys=8192")
    op, cache = registry()["indexer_logits_paged"], {"cache": Spec((1 << 16, 64, 68), "uint8")}
    fp8, mxfp4 = (op.work(op.bind(specs, op.attributes()), keys) for specs in (call.specs, {**call.specs, **cache}))
    assert fp8.bytes - mxfp4.bytes == 64 * 8192 * 64


def test_selections_need_no_logits_in_memory() -> None:
    """What a launch writes and the next one reads may stay on the chip."""
    tokens, keys = 512, 4096
    specs = {
        "q8": Spec((tokens, 32, 128), "float8_e4m3fn"), "weights": Spec((tokens, 32), "float32"),
        "keys": Spec((keys, 128), "float8_e4m3fn"), "key_scales": Spec((keys,), "float32"),
        "starts": Spec((tokens,), "int32"), "ends": Spec((tokens,), "int32"),
    }  # fmt: skip
    for name, attrs in (("indexer_blocks", {"k": 64, "granularity": 8}), ("indexer_topk", {"k": 64})):
        op = registry()[name]
        work = op.work(op.bind(specs, op.attributes(**attrs)), None)
        assert work.bytes == sum(spec.nbytes for spec in specs.values()) + tokens * 64 * 4
        assert work.fp8_flops == 2 * tokens * keys * 32 * 128


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_every_known_device_has_rates(device: Device) -> None:
    call, keys = call_of("dsa_attention", "b=64 h=128 context=32768 k=2048")
    seconds, more = call.estimate(device, keys), call.estimate(device, 2 * keys)
    assert seconds is not None and more is not None and 0 < seconds < more < 2 * seconds
    assert call.estimate(Device.of("NVIDIA Unknown", 90, 10)) is None
