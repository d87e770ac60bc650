"""`supports` answers from the declaration and the planner."""

import numpy as np
import pytest

from tools import support_matrix
from xmla import ArgumentError, Device, supports
from xmla.core.registry import registry
from xmla.core.values import A100, H200, KNOWN_DEVICES, PEAKS, find_device

DEVICES = "H100, H200, B200, B300, RTX PRO 6000, GB10, L40S, A100"


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("op", sorted(registry()))
def test_every_op_runs_on_every_known_device(op: str, device: Device) -> None:
    assert supports(op, device)


def test_reasons_are_those_of_the_call() -> None:
    device = KNOWN_DEVICES[0]
    answer = supports("sparse_mla", device, H=129)
    assert not answer and answer.reason == "sparse_mla: q axis H (axis 1) is 129, supported: at most 128 heads"
    assert all(supports("sparse_mla", device, H=heads) for heads in range(1, 129))
    old = Device.of("NVIDIA V100", 70, 80)
    assert supports("select_topk", old).reason == (
        "select_topk: device NVIDIA V100 has compute capability 7.0, supported: 8.0 and later"
    )


def test_questions_that_make_no_sense() -> None:
    with pytest.raises(
        ArgumentError, match="op is 'sparse', expected one of compress_kv, compress_rows, compress_rows_backward, co"
    ):
        supports("sparse", KNOWN_DEVICES[0])
    with pytest.raises(ArgumentError, match="axis is 'Z', expected one of"):
        supports("sparse_mla", KNOWN_DEVICES[0], Z=3)
    with pytest.raises(ArgumentError, match=r"^supports: H type is float, expected int$"):
        supports("sparse_mla", KNOWN_DEVICES[0], H=1.5)
    with pytest.raises(ArgumentError, match=r"^supports: device is int, expected a Device or the name of one$"):
        supports("sparse_mla", 90)
    with pytest.raises(ArgumentError, match=rf"^device is 'V2', expected one of {DEVICES}"):
        supports("sparse_mla", "V2")


# As drivers and data sheets name GPUs that are none of the known ones, whatever those are called.
OTHERS = (
    "H20", "NVIDIA H20", "GH200", "NVIDIA GH200 480GB", "H100 PCIe", "H200 NVL", "B20", "B100", "GB200", "GB300",
    "L4", "L40", "L20", "A10", "A10G", "A30", "A40", "A800", "A100X", "RTX 6000", "RTX 6000 Ada", "RTX A6000",
    "RTX PRO 5000 Blackwell", "RTX 5090", "6000", "Blackwell", "RTX", "NVIDIA", "NVIDIA ", "200", "H", "",
)  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_of_another_gpu_is_none_of_the_known(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^device is '{name}', expected one of {DEVICES}"):
        find_device(name)
    device = Device.of(name, 90, 132)
    assert device not in KNOWN_DEVICES and device.name not in PEAKS  # no figure is that of a known one


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_a_known_device_is_found_by_its_names(device: Device) -> None:
    short = device.name.removeprefix("NVIDIA ")
    names = {device.name, short, short.removesuffix(" Blackwell")}
    assert {find_device(each) for name in names for each in (name, name.lower(), name.upper())} == {device}


def test_the_format_of_a_cache_and_the_dtype_of_an_argument() -> None:
    """The answer names the call that it is for."""
    assert all(supports("sparse_mla", A100, cache=kind) for kind in ("plain", "v32", "v4"))
    assert "cache uint8[6, 64, 584] (v4)" in supports("sparse_mla", H200, cache="v4", T=9, H=3).call
    assert supports("sparse_mla", H200, cache="v4", T=9, H=3).call.startswith("q bfloat16[9, 3, 512], ")
    assert supports("indexer_logits_paged", H200, cache="mxfp4").call.startswith("q8 float8_e4m3fn[")
    for name in registry():
        assert supports(name, H200).call
    wrong = supports("sparse_mla", H200, cache="plain", q="float16")
    assert wrong.reason == "sparse_mla: cache dtype is bfloat16, expected float16, as q" and "q float16" in wrong.call
    with pytest.raises(
        ArgumentError, match=r"^supports: cache is 'v9', expected one of bfloat16, float16, nope, nvfp4"
    ):
        supports("sparse_mla", H200, cache="v9")
    with pytest.raises(
        ArgumentError, match=r"^supports: sparse_mla has no case with cache v32 and extra_cache v4 toge"
    ):
        supports("sparse_mla", H200, cache="v32", extra_cache="v4")
    with pytest.raises(ArgumentError, match=r"^supports: cache type is int, expected str$"):
        supports("sparse_mla", H200, cache=3)
    with pytest.raises(ArgumentError, match=r"^supports: q is 'half', expected one of float64, "):
        supports("sparse_mla", H200, q="half")


def test_a_device_by_its_name() -> None:
    assert supports("sparse_mla", "H200", H=16) == supports("sparse_mla", H200, H=16)
    assert supports("sparse_mla", "a100") == supports("sparse_mla", A100)
    assert supports("map_slots", "H200", K=np.int32(64))


def test_the_committed_table_stands_below_its_head() -> None:
    text = support_matrix.FILE.read_text()
    assert text.startswith(f"{support_matrix.HEAD}\n| op | format | ")
    columns = support_matrix.committed()
    assert [*columns] == [*support_matrix.ARCHITECTURES]
    assert {op.strip("`") for op, _ in columns[90]} == {*registry()}


def test_a_format_of_no_case_is_told_so() -> None:
    """The op may take it: `supports` asks with the arguments of a case."""
    message = r"^supports: mla_cache is 'plain', expected one of uint8, v32, which cases of dsa_attention have$"
    with pytest.raises(ArgumentError, match=message):
        supports("dsa_attention", "H200", mla_cache="plain")
