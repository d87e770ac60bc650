"""Start a process as SGLang does, plugins first, on a pretended H200; print the changed functions, one a line.

python start.py SGLANG_PLUGINS
"""

import sys
from types import SimpleNamespace

import pytest
import stand_ins
import torch

patch = pytest.MonkeyPatch()
stand_ins.install(patch)
device = SimpleNamespace(multi_processor_count=132, major=9, minor=0, name="H200", total_memory=1 << 37)
for name, answer in {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
    "get_device_name": device.name, "get_device_properties": device,
}.items():  # fmt: skip
    patch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)

stand_ins.load_plugins(patch, sys.argv[1])
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

print(*sorted(HookRegistry._patched), sep="\n")
