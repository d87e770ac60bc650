"""The calls that serving a model makes, as specs: what `warmup` compiles and `xmla plan` prints."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from xmla.core.attribute import Attr
from xmla.core.call import plan_call
from xmla.core.compile import Specialization, begins_anywhere, specialize
from xmla.core.device import Device
from xmla.core.errors import ArgumentError
from xmla.core.formats.mla import MLA_LAYOUTS, MlaLayout
from xmla.core.plan import Plan
from xmla.core.registry import registry
from xmla.core.roofline import estimate
from xmla.core.spec import Spec

POOLS = (2, 1 << 20)  # pages: plans may depend on whether a pool is small or large compared with its references
LAST_CHUNKS = (1, 2, 3, 4, 8, 16, 24, 32, 64, 96, 128, 256, 512)  # tokens: plans depend on the waves that programs fill
FEW = range(1, 49)  # tokens: with each one more attention may divide their keys otherwise


@dataclass(frozen=True, slots=True)
class Call:
    """One op at given sizes: its arguments' specs by name, and its attributes.

    Attributes:
        alternative: A step may make it in the place of calls before it.
    """

    op: str
    specs: Mapping[str, Spec]
    attrs: Mapping[str, Any]
    alternative: bool = False

    def plan(self, device: Device, implementation: str | None = None) -> Plan:
        op = registry()[self.op]
        specs = tuple(self.specs.get(name) for name in op.tensors)
        return plan_call(op, specs, op.attributes(**self.attrs), device, implementation)[0]

    def specializations(self, device: Device) -> list[Specialization]:
        """The kernels that the call launches on `device`."""
        plan = self.plan(device)
        return [specialize(launch, plan, self.specs) for launch in plan.active]

    def over(self, pages: int) -> "Call":
        """The call with pools of `pages` pages."""
        tensors = registry()[self.op].tensors
        pools = {name: spec for name, spec in self.specs.items() if tensors[name].format is not None}
        pools = {name: replace(spec, shape=(pages, *spec.shape[1:])) for name, spec in pools.items()}
        return replace(self, specs={**self.specs, **pools})

    def at_any_place(self) -> Iterator["Call"]:
        """The call, and with the arrays that may begin on no multiple of 16 bytes, as where a step's others end."""
        yield self
        shifted = {
            name: replace(spec, alignment=spec.itemsize)
            for name, spec in self.specs.items()
            if begins_anywhere(name, spec)
        }
        if shifted:
            yield replace(self, specs={**self.specs, **shifted})

    def estimate(self, device: Device, keys: int | None = None) -> float | None:
        """The least seconds by the roofline, with `keys` in every request, by default as many as fit."""
        op = registry()[self.op]
        problem = op.bind(self.specs, op.attributes(**self.attrs))
        return estimate(op.work(problem, keys), self.plan(device), device)


def specializations(calls: Iterable[Call], device: Device) -> list[Specialization]:
    """The kernels that these calls launch on `device`, each once, in order of first use."""
    kernels: dict[Specialization, None] = {}
    for call in calls:
        kernels |= dict.fromkeys(call.specializations(device))
    return list(kernels)


def split(requests: int, next_n: int) -> Call:
    """The call that splits a mixed batch with up to `next_n` tokens per request."""
    batch = {"query_starts": Spec((requests + 1,), "int32"), "lengths": Spec((requests,), "int32")}
    return Call("split_batch", batch, {"num_tokens": requests * next_n, "decode_threshold": next_n})


def place(page: int) -> Iterator[Call]:
    """The calls that find the slots of new tokens, a position each, with request ids or not; of any sizes."""
    one, ids = Spec((1, 1), "int32"), {"request_ids": Spec((1,), "int32")}
    for more in ({}, ids):
        yield Call("map_slots", {"indices": one, "block_table": one, **more}, {"page_size": page})


def layout_of(name: str, model: type, rope_in_value: bool) -> MlaLayout:
    """The format of a latent cache by its name, if entries have the dims of the model's.

    Raises:
        ArgumentError: There is no such format for the model.
    """
    layouts = {layout.name: layout for layout in MLA_LAYOUTS if layout.rope_in_value == rope_in_value}
    if name not in layouts:
        raise ArgumentError(f"{model.__name__}: a cache's format is {name!r}, expected one of {', '.join(layouts)}")
    return layouts[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """The calls that serving a model makes, at every size that occurs; each model says what the sizes mean."""

    next_n: tuple[int, ...] = (1,)
    mixed: bool = False
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    max_lens: tuple[int, ...] = (4096, 32768, 131072)
    prefill_tokens: tuple[int, ...] = (2048, 8192)

    def __post_init__(self) -> None:
        """Raise ArgumentError for a field of another type than declared, or a number that counts nothing."""
        model = type(self).__name__
        for field in fields(self):
            declared = Attr.of(field.name, field.type, field.default)
            value = declared.plain(model, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            for number in value if declared.many else (value,):
                if declared.type is int and number < 1:
                    raise ArgumentError(f"{model}: {field.name} value is {number}, expected at least 1")
        for name in ("max_lens", "next_n"):
            if not getattr(self, name):
                raise ArgumentError(f"{model}: {name} is empty, expected at least one number")

    @abstractmethod
    def caches(self) -> dict[str, Spec]:
        """The pools of a layer; the number of pages is arbitrary, since `specializations` replaces it."""

    @abstractmethod
    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or up to `next_n` if `mixed`."""

    @abstractmethod
    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`."""

    def steps(self) -> Iterator[tuple[str, list[Call]]]:
        """Every step that the lists describe: its description and its calls."""
        for max_len in self.max_lens:
            for requests in self.batches:
                for next_n in self.next_n:
                    step = f"decode {requests} requests × {next_n}, max_len {max_len}"
                    yield step, list(self.decode(requests, next_n, max_len))
                if self.mixed:
                    step = f"decode {requests} requests × {max(self.next_n)}, mixed, max_len {max_len}"
                    yield step, list(self.decode(requests, max(self.next_n), max_len, mixed=True))
            for tokens in self.prefill_tokens:
                yield f"prefill {tokens} tokens, max_len {max_len}", list(self.prefill(tokens, max_len))

    def instead(self) -> Iterator[Call]:
        """Calls that a step may make in the place of some of its own."""
        yield from ()

    def prefills(self, tokens: int, max_len: int) -> Iterator[Call]:
        """The calls of a prefill step, and those of decodes, which a caller may make for any number of tokens."""
        yield from self.prefill(tokens, max_len)
        for mixed in (False, True):
            step = self.decode(1, tokens, max(max_len, tokens), mixed)
            yield from (call for call in step if call.op != "split_batch")

    def specializations(self, device: Device) -> list[Specialization]:
        """The complete list of kernels that these steps launch on `device`, each once, in order of first use.

        Short prompts, and the last chunks of others, have any number of tokens up to the largest prefill step's. Plans
        differ by it, so that LAST_CHUNKS are steps as well, what fills a few waves of programs, and all FEW of
        attention. In a step with decodes a prefill's arrays of tokens begin where the decodes' end, on no multiple of
        16 bytes, for which kernels are compiled anew.
        """
        calls = [call for _, step in replace(self, prefill_tokens=()).steps() for call in step]
        most = max(self.prefill_tokens, default=0)
        waves = (device.num_sms * programs + more for programs in (1, 2, 4, 8, 16) for more in (-8, 0, 1))
        whole = {*self.prefill_tokens, *(tokens for tokens in (*LAST_CHUNKS, *waves) if tokens < most)}
        few = {tokens for tokens in FEW if tokens < most}
        for max_len, tokens in product(self.max_lens, sorted(whole | few)):
            prefill = (call for call in self.prefills(tokens, max_len) if tokens in whole or call.op == "sparse_mla")
            calls += [placed for call in prefill for placed in call.at_any_place()]
        calls += self.instead()
        for page in {spec.shape[1]: None for spec in self.caches().values()}:
            calls += [placed for call in place(page) for placed in call.at_any_place()]
        return specializations((call.over(pages) for call in calls for pages in POOLS), device)
