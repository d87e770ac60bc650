"""No step of a server within a configuration launches a kernel that warm-up does not list: plans alone, of any GPU."""

import pytest
from conftest import EVERYTHING

from tools import soak
from xmla.core.models.checkpoint import model_config
from xmla.core.models.published import PUBLISHED
from xmla.core.values import B200, H200, RTX_PRO_6000, Device

STEPS = 5000 if EVERYTHING else 800
MOST = 300  # kernels of a list, each of which is compiled for seconds
# A model by default on a Hopper GPU, and random configurations of it on others; `python -m tools.soak` has many more.
SERVED = [(0, H200, "torch"), (17, H200, "torch"), (32, RTX_PRO_6000, "torch"), (2, B200, "jax")]


@pytest.mark.parametrize(("number", "device", "framework"), SERVED, ids=lambda part: str(getattr(part, "name", part)))
@pytest.mark.parametrize("name", soak.MODELS)
def test_steps_launch_no_other_kernel(name: str, number: int, device: Device, framework: str) -> None:
    config = soak.configuration(soak.MODELS[name], number, framework)
    listed = set(config.specializations(device))
    assert len(listed) < MOST
    for place in range(STEPS):
        missing = soak.unlisted(soak.step(config, (number, place), framework), device, listed)
        assert not missing, f"{missing[0]}; python -m tools.soak --rerun {name}/{number}/{place}, of {config}"


def test_every_released_model_is_planned_at_random() -> None:
    """A class that `MODELS` lacks could miss kernels in its warm-up without a test that tells."""
    assert {type(model_config(name)) for name in PUBLISHED} == set(soak.MODELS.values())
