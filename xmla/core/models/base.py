"""What the models that are served share: the steps of a model, and calls that several make."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from math import gcd

from xmla.core.compile import Specialization
from xmla.core.errors import ArgumentError
from xmla.core.formats.mla import MLA_LAYOUTS, PLAIN_V4, MlaLayout
from xmla.core.models.calls import Call, KernelList, Make
from xmla.core.models.steps import full_waves, powers_of_2, token_counts
from xmla.core.values import Attr, Device, Spec, cdiv

POOLS = (2, 1 << 20)  # pages: plans may depend on whether a pool is small or large compared with its references
MOST_SHARED = 128  # tokens of a request whose rows are one product
LONG = 1 << 15  # tokens of a context from which on fewer tokens fit a workspace at once than a GPU has programs for


def split(requests: int, next_n: int) -> Call:
    """The call that splits a mixed batch with up to `next_n` tokens per request."""
    batch = {"query_starts": Spec((requests + 1,), "int32"), "lengths": Spec((requests,), "int32")}
    return Call("split_batch", batch, {"num_tokens": requests * next_n, "decode_threshold": next_n})


def place(page: int, positions: int) -> Iterator[Call]:
    """The calls that find the slots of new tokens: so many of each request, or one in a row, with request ids."""
    table, ids = Spec((1, 1), "int32"), {"request_ids": Spec((1,), "int32")}
    for width, more in ((positions, {}), (1, ids)):
        specs = {"indices": Spec((1, width), "int32"), "block_table": table, **more}
        yield Call("map_slots", specs, {"page_size": page})


def map_call(k: int, page: int, *, compact: bool = False, request_ids: bool = True) -> Call:
    """The call of `map_slots`, whose kernel is the same for any number of tokens and any table.

    Without `request_ids` each token has a row of the table.
    """
    shapes = {"indices": (1, k), "block_table": (1, 1)} | ({"request_ids": (1,)} if request_ids else {})
    specs = {name: Spec(shape, "int32") for name, shape in shapes.items()}
    return Call("map_slots", specs, {"page_size": page, "compact": compact})


def layout_of(name: str, model: type, rope_in_value: bool) -> MlaLayout:
    """The format of a latent cache by its name, if entries have the dims of the model's.

    Plain rows of 512 dims are those of V4 and also of entries without roped dims.

    Raises:
        ArgumentError: There is no such format for the model.
    """
    fitting = (layout for layout in MLA_LAYOUTS if layout.rope_in_value == rope_in_value or layout is PLAIN_V4)
    layouts = {layout.name: layout for layout in fitting}
    if name not in layouts:
        raise ArgumentError(f"{model.__name__}: a cache's format is {name!r}, expected one of {', '.join(layouts)}")
    return layouts[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(ABC):
    """The calls that serving a model makes, at every size that occurs; each model says what the sizes mean."""

    next_n: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)  # drafts of up to 7 tokens, as recipes have them
    mixed: bool = False
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    max_lens: tuple[int, ...] = (1 << 20,)
    prefill_tokens: tuple[int, ...] = (2048, 8192)
    scale_floor: str | None = None
    workspace_bytes: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        """Raise ArgumentError for a field of another type than declared, or a number that counts nothing."""
        model = type(self).__name__
        for each in fields(self):
            declared = Attr.of(each.name, each.type, each.default)
            value = declared.plain(model, getattr(self, each.name))
            object.__setattr__(self, each.name, value)
            for number in value if declared.many else (value,):
                if declared.type is int and number is not None and number < 1:
                    raise ArgumentError(f"{model}: {each.name} value is {number}, expected at least 1")
        for name in ("max_lens", "next_n"):
            if not getattr(self, name):
                raise ArgumentError(f"{model}: {name} is empty, expected at least one number")

    @property
    def floor(self) -> dict[str, str]:
        """The attribute of ops that write latent entries, unless it is each op's own."""
        return {} if self.scale_floor is None else {"scale_floor": self.scale_floor}

    @property
    def room(self) -> dict[str, int]:
        """The attribute of ops that select, unless it is each op's own."""
        return {} if self.workspace_bytes is None else {"workspace_bytes": self.workspace_bytes}

    @property
    def invariance(self) -> dict[str, bool]:
        """The attribute of ops that attend, unless it is each op's own."""
        return {"batch_invariant": True} if self.batch_invariant else {}

    @abstractmethod
    def caches(self) -> dict[str, Spec]:
        """The pools of a layer; the number of pages is arbitrary, since `specializations` replaces it."""

    @abstractmethod
    def decode(self, requests: int, next_n: int, max_len: int, mixed: bool = False) -> Iterator[Call]:
        """A decode step of `requests`, with `next_n` tokens each, or up to `next_n` if `mixed`."""

    @abstractmethod
    def prefill(self, tokens: int, max_len: int) -> Iterator[Call]:
        """A prefill step of `tokens`."""

    def gathering(self, tokens: int, keys: int) -> Iterator[Call]:
        """A prefill step of `tokens` that gathers so many keys, which may be those of several prompts."""
        return iter(())

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

    def paged(self, requests: int, next_n: int, max_len: int, mixed: bool) -> Iterator[Call]:
        """The calls of a decode's layers, which a caller may make of a prefill's tokens too."""
        return (call for call in self.decode(requests, next_n, max_len, mixed) if call.op != "split_batch")

    def prefills(self, tokens: int, max_len: int) -> Iterator[Call]:
        """The calls of a prefill step, in either way."""
        yield from self.prefill(tokens, max_len)
        for mixed in (False, True):
            yield from self.paged(1, tokens, max_len, mixed)

    def specializations(self, device: Device) -> list[Specialization]:
        """The complete list of kernels that steps within these sizes launch on `device`, each once."""
        return list(self.kernel_list(device).listed)

    def kernel_list(self, device: Device) -> KernelList:
        """The complete list of kernels that steps within these sizes launch on `device`.

        A decode has any number of requests, a prefill any number of tokens and a table any width, up to the largest
        that is listed: those of a server have. Plans follow them by powers of two and by the waves that programs fill,
        attention's by each number of few tokens. In a step with decodes a prefill's arrays of tokens begin where the
        decodes' end, on no multiple of 16 bytes, for which kernels are compiled anew.
        """
        kernels, longest = KernelList(device), max(self.max_lens)
        last: tuple[Make | None, tuple[int, ...]] = None, (0,)
        for make, sizes in self.listed_steps(device):
            kernels.add_step(make, *sizes)
            alike = last[0] is make and last[1][1:] == sizes[1:]
            # What a row's parts are served by is the same in a narrower table, if the row does not fit.
            if self.workspace_bytes is not None and alike and sizes[-1] >= longest:
                kernels.add_between(make, last[1][0], *sizes)
            last = make, sizes
        return kernels

    def listed_steps(self, device: Device) -> Iterator[tuple[Make, tuple[int, ...]]]:
        """What makes calls, and sizes of them, so that these launch every kernel of steps within this model's sizes."""
        requests, most = max(self.batches, default=0), max(self.next_n)
        prefill = max(self.prefill_tokens, default=0)

        def mixed(tokens: int, max_len: int) -> Iterable[Call]:
            return self.paged(tokens, 1, max_len, mixed=True)

        def prefills(tokens: int, max_len: int) -> Iterable[Call]:
            return (call.with_unaligned() for call in self.prefills(tokens, max_len))

        def equal_prompts(count: int, tokens: int, max_len: int) -> Iterable[Call]:
            return (call.with_unaligned() for call in self.paged(count, tokens, max_len, mixed=False))

        def writes_of(make: Make) -> Make:
            return lambda *sizes: (each for call in make(*sizes) for each in call.of_parts_of_rows())

        def gathering(tokens: int, keys: int) -> Iterable[Call]:
            return (call.with_unaligned() for call in self.gathering(tokens, keys))

        def attention(tokens: int, pages: int) -> Iterable[Call]:
            return (call.with_pages(pages) for call in self.attention(tokens))

        def attention_of_prefills(tokens: int, pages: int) -> Iterable[Call]:
            return (call.with_pages(pages).with_unaligned() for call in self.attention(tokens, prefill=True))

        def places(page: int, positions: int) -> Iterable[Call]:
            return (call.with_unaligned() for call in place(page, positions))

        def steps(max_len: int, decode: Make, mixed: Make, prefills: Make) -> Iterator[tuple[Make, tuple[int, ...]]]:
            for next_n in self.next_n:
                for tokens in full_waves(device, requests * next_n):
                    for count in {max(tokens // next_n, 1), cdiv(tokens, next_n)}:
                        yield decode, (count, next_n, max_len)
            for tokens in full_waves(device, requests * most if self.mixed else 0):
                yield mixed, (tokens, max_len)
            for tokens in full_waves(device, prefill):
                yield prefills, (tokens, max_len)

        decode, longest = self.decode, max(self.max_lens)
        contexts, writes = self.contexts(longest), [writes_of(make) for make in (decode, mixed, prefills)]
        for max_len in contexts:
            yield from steps(max_len, decode, mixed, prefills)
        for max_len in {contexts[0], longest}:  # a write's kernel depends on whether anything is selected, no more
            yield from steps(max_len, *writes)
        for keys, tokens in product(self.contexts(max(longest, prefill)), full_waves(device, prefill)):
            if keys > longest:
                yield gathering, (tokens, keys)
        # Tokens of a request share programs, whose number tells how many share a row that does not fit a workspace.
        for next_n, count in product(self.next_n, full_waves(device, requests)):
            yield decode, (count, next_n, longest)
        for prompt in powers_of_2(min(prefill, MOST_SHARED)):
            for count in full_waves(device, prefill // prompt):
                yield equal_prompts, (count, prompt, longest)
        if self.mixed and requests:
            yield lambda: (split(requests, most),), ()
        for make, tokens_of in ((attention, requests * most), (attention_of_prefills, prefill)):
            for tokens, pages in product(token_counts(device, tokens_of), POOLS):
                yield make, (tokens, pages)
        pages = {spec.shape[1]: None for spec in self.caches().values()}
        rows = {min(n + more, prefill) for n in powers_of_2(prefill) for more in (0, 1, 4)}  # whole vectors, and not
        for page, positions in product(pages, sorted({1, *self.next_n, *rows})):
            yield places, (page, positions)

    def contexts(self, longest: int) -> list[int]:
        """Lengths of contexts, in tokens, whose tables have the widths at which plans differ: powers of two, the most.

        Rows of as many columns as a table has entries may be whole vectors or not: where a page alone is none, tables
        of a few pages more, or fewer, are those of the other kind. Of long ones there is also what exceeds each power
        of two, by the least of either kind: more of their tokens fit the workspace at once than of the next power, and
        other kernels serve them. The first table of more entries than are selected may be narrower than such a power.
        """
        more = {0, *(page * n for entries, page in self.pages() for n in range(4 // gcd(entries, 4)))}
        chosen_of = [page * (k // entries + 1) for entries, page in self.pages() for k in self.selected]
        longer = {min(length + pages, longest) for length in (*powers_of_2(longest), *chosen_of) for pages in more}
        least = [(page, page * (4 // gcd(entries, 4))) for entries, page in self.pages()]
        long = [length for length in powers_of_2(longest) if length >= LONG]
        longer |= {min(length + pages, longest) for length in long for pages in map(min, zip(*least, strict=True))}
        return sorted(longer | {max(longest - pages, 1) for pages in more})

    @property
    @abstractmethod
    def selected(self) -> tuple[int, ...]:
        """How many entries of a table the selections have, which are all of them if there are no more."""

    def pages(self) -> Iterator[tuple[int, int]]:
        """The entries of a page of each cache, and the tokens that it stands for."""
        for spec in self.caches().values():
            yield spec.shape[1], spec.shape[1]

    def attention(self, tokens: int, *, prefill: bool = False) -> Iterator[Call]:
        """The calls of attention alone, of so many tokens, whose plans follow each number of them, and the pool.

        Those of a decode, which a caller may make of a prefill's tokens too, and with `prefill` those of a prefill.
        """
        longest = max(self.max_lens)
        steps = (*self.decode(1, tokens, longest), *(self.prefill(tokens, longest) if prefill else ()))
        return (call for call in steps if call.op == "sparse_mla")
