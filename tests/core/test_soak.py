"""No step of a server within a configuration launches a kernel that warm-up does not list: plans alone, of any GPU."""

from dataclasses import replace
from typing import Any

import pytest
from conftest import EVERYTHING

from tools import soak
from xmla import ModelConfigV4
from xmla.core.compile import Specialization
from xmla.core.models import calls
from xmla.core.models.base import Model
from xmla.core.models.calls import Call, specializations
from xmla.core.models.checkpoint import model_config
from xmla.core.models.published import PUBLISHED
from xmla.core.op import trace_call
from xmla.core.values import B200, H200, KNOWN_DEVICES, RTX_PRO_6000, Device, Spec

STEPS = 5000 if EVERYTHING else 800
MOST = 520  # kernels of a list, each of which is compiled for seconds
# A model by default on a Hopper GPU, and random configurations of it on others; `python -m tools.soak` has many more.
DEFAULT = (0, H200, "torch")
RANDOM = [(20, H200, "torch"), (2, B200, "jax"), (32, RTX_PRO_6000, "torch")]
# The first model has all of them. Of the others, whose lists and steps are of the same classes, each has one in turn.
SERVED = [
    (name, *served)
    for number, name in enumerate(soak.MODELS)
    for served in (DEFAULT, *(RANDOM if EVERYTHING or number == 0 else [RANDOM[(number - 1) % len(RANDOM)]]))
]


@pytest.mark.parametrize(
    ("name", "number", "device", "framework"), SERVED, ids=lambda part: str(getattr(part, "name", part))
)
def test_steps_launch_no_other_kernel(name: str, number: int, device: Device, framework: str) -> None:
    config = soak.configuration(soak.MODELS[name], number, framework)
    listed = set(config.specializations(device))
    assert len(listed) < MOST
    for place in range(STEPS):
        missing = soak.unlisted(soak.step(config, (number, place), framework), device, listed)
        assert not missing, f"{missing[0]}; python -m tools.soak --rerun {name}/{number}/{place}, of {config}"


@pytest.mark.parametrize("name", soak.MODELS)
def test_each_number_of_tokens_in_a_small_workspace(name: str) -> None:
    """Rows of logits do not fit it from some number of tokens on, of which no power of two tells."""
    longest, most = 1 << 17, 128
    sizes: dict[str, Any] = {"heads": 32, "index_heads": 16, "k": 128, "batches": (12,), "max_lens": (longest,)}
    config = soak.MODELS[name](next_n=(8,), mixed=True, prefill_tokens=(most,), workspace_bytes=1 << 23, **sizes)
    calls: list[Call] = []
    for tokens in range(1, most + 1):
        prompts = [prompt for prompt in (1, 2, 3, 4, 8, 16) if tokens % prompt == 0]
        calls += (call for n in prompts for call in config.paged(tokens // n, n, longest, mixed=False))
        calls += config.prefills(tokens, longest)
    missing = set(specializations(calls, H200)) - set(config.specializations(H200))
    assert not missing, missing


def test_every_released_model_is_planned_at_random() -> None:
    """A class that `MODELS` lacks could miss kernels in its warm-up without a test that tells."""
    assert {type(model_config(name)) for name in PUBLISHED} == set(soak.MODELS.values())


def every_kernel(config: Model, device: Device) -> list[Specialization]:
    """The kernels of every call of the list, each of which is planned."""
    kernels: dict[Specialization, None] = {}
    calls = (call for make, sizes in config.listed_steps(device) for call in make(*sizes))
    for call in {(c.op, *c.specs.items(), *c.attrs.items(), c.unaligned): c for c in calls}.values():
        kernels |= dict.fromkeys(call.specializations(device))
    return list(kernels)


@pytest.mark.parametrize("name", soak.MODELS)
def test_a_list_of_few_plans_has_the_kernels_of_every_call(name: str) -> None:
    sizes: dict[str, Any] = {"mixed": True}
    if not EVERYTHING:
        sizes |= {"next_n": (1, 3), "batches": (8,), "max_lens": (1 << 15,), "prefill_tokens": (200,)}
    config = soak.MODELS[name](**sizes)
    for device in KNOWN_DEVICES if EVERYTHING else (H200,):
        assert config.specializations(device) == every_kernel(config, device)


def test_calls_of_another_kind_are_planned() -> None:
    """A kind is all but sizes: where arrays begin, their dtypes, and attributes that are no integers."""
    indices, table = Spec((8, 3), "int32"), Spec((8, 5), "int32")
    attrs = {"page_size": 64}
    calls = [
        Call("map_slots", {"indices": replace(indices, alignment=alignment), "block_table": table}, attrs | more)
        for more in ({}, {"compact": True})
        for alignment in (16, 4)
    ]
    calls += [call.with_unaligned() for call in calls[:1]]
    kernels = [kernel for call in calls for kernel in call.specializations(H200)]
    assert specializations(calls, H200) == list(dict.fromkeys(kernels)) and len(set(kernels)) == 4


def test_a_list_plans_calls_of_one_kind_alone_that_give_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    monkeypatch.setattr(calls, "trace_call", lambda op, *given: [traced.append(op.name), trace_call(op, *given)][1])
    ModelConfigV4().specializations(H200)
    assert len(traced) < 150  # of 75 thousand calls, which take a quarter of a minute to plan where this takes a second
