"""Whether a list for warm-up, a model's or of an engine's plugin, has the kernels of every call that steps may make."""

from collections.abc import Callable, Collection

import numpy as np
import pytest
from conftest import EVERYTHING

from xmla.core.compile import Specialization
from xmla.core.models.calls import Call
from xmla.core.values import KNOWN_DEVICES, Device

# Plans follow architecture and SMs: of devices that are alike in both one stands for all, or one for a generation.
ALIKE = {(device.arch, device.num_sms) if EVERYTHING else device.arch // 10: device for device in KNOWN_DEVICES}
PLANNED = pytest.mark.parametrize("device", ALIKE.values(), ids=lambda device: device.name)


def any_size(rng: np.random.Generator, most: int) -> int:
    """Each power of two as likely as another."""
    return min(most, int(2 ** rng.uniform(0, np.log2(most + 1))))


def unlisted(device: Device, found: Collection[Specialization], make: Callable[[], Call]) -> list[str]:
    """Kernels of so many calls that are not among those found."""
    missing = []
    for _ in range(400 if EVERYTHING else 100):
        made = make()
        missing += [f"{made}: {kernel}" for kernel in made.specializations(device) if kernel not in found]
    return missing
