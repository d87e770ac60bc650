"""Scratch memory of `sparse_mla` that engines' plugins reserve at start: the most that the calls of any step need."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from xmla.core.call import ALIGNED, whole_vectors
from xmla.core.formats.mla import PLAIN, PLAIN_V4, V4, V32, MlaLayout
from xmla.core.models.calls import Call
from xmla.core.models.steps import SPLIT_TOKENS
from xmla.core.values import Device, Spec

PAGE = 64  # entries on a page of V3.2's cache in vLLM and SGLang, and of V4's window in vLLM
LARGE_POOL = 1 << 20  # pages
# Entries are gathered from this many references to each on: as in the op, which so dequantises a whole small pool.
MIN_REFERENCES = 32


def most_gathered(tokens: int, keys: int) -> int:
    """The most entries that are gathered for so many tokens, each with so many slots."""
    return tokens * keys // MIN_REFERENCES


def pool(layout: MlaLayout, pages: int, page: int = PAGE) -> Spec:
    return Spec((pages, page, layout.row), "uint8" if layout.packed else "bfloat16")


def arguments(q: Spec, cache: Spec, keys: int, extra: Spec | None = None, width: int = 0) -> dict[str, Spec]:
    """Arguments of attention to `keys` slots for each token, and to `width` slots of a second pool."""
    tokens = q.shape[0]
    specs = {"q": q, "cache": cache, "slots": Spec((tokens, keys), "int32"), "lengths": Spec((tokens,), "int32")}
    if extra is None:
        return specs
    second = {"extra_slots": Spec((tokens, width), "int32"), "extra_lengths": Spec((tokens,), "int32")}
    return specs | {"extra_cache": extra} | second


def format_names(layout: MlaLayout, extra: MlaLayout | None = None) -> dict[str, Any]:
    """Attributes of attention to entries of this format and, if a second pool is there, of `extra`."""
    return {"cache_format": layout.name} | ({} if extra is None else {"extra_cache_format": extra.name})


def attention(
    layout: MlaLayout, heads: int, keys: int, tokens: int, pages: int, extra: int = 0,
    extra_layout: MlaLayout | None = None,
) -> Call:  # fmt: skip
    """Attention of so many tokens to `keys` slots each, and to `extra` ones of a second pool.

    This has entries of `extra_layout`, by default of the first pool's.
    """
    q, second = Spec((tokens, heads, layout.dims), "bfloat16"), extra_layout or layout
    tensors = arguments(q, pool(layout, pages), keys, pool(second, pages) if extra else None, extra)
    return Call("sparse_mla", tensors, {"softmax_scale": 1.0} | format_names(layout, second if extra else None))


def max_workspace_bytes(
    calls: Callable[[int, int], Iterable[Call]], keys: int, tokens: int, device: Device, gathered: int = 0
) -> int:
    """Bytes for any step of up to so many tokens, whose calls have some of them: `calls(tokens, pages)`.

    Splits of the keys, which few tokens have, over pools of any size; and beside them rows of entries, of a pool that
    is small enough to be dequantised first or `gathered` from a larger one. Both grow with the tokens that share them,
    so that those of a step's decodes and prefills are together no more than those of all tokens.
    """

    def needed(tokens: int, pages: int) -> int:
        return max(call.plan(device).workspace_bytes for call in calls(tokens, pages))

    splits = max(needed(count, LARGE_POOL) for count in range(1, min(tokens, SPLIT_TOKENS) + 1))
    return max(needed(tokens, max(1, most_gathered(tokens, keys) // PAGE)), gathered) + splits


def gathered_bytes(keys: int, tokens: int) -> int:
    """Rows of as many of V3.2's entries as so many tokens may make a step gather."""
    return most_gathered(tokens, keys) * PLAIN.dims * 2


@lru_cache
def scratch_v32(
    heads: int, keys: int, tokens: int, device: Device, gathers: bool, layouts: tuple[MlaLayout, ...] = (V32, PLAIN)
) -> int:  # fmt: skip
    def calls(tokens: int, pages: int) -> Iterable[Call]:
        return (attention(layout, heads, keys, tokens, pages) for layout in layouts)

    return max_workspace_bytes(calls, keys, tokens, device, gathered_bytes(keys, tokens) if gathers else 0)


@lru_cache
def scratch_v4(
    heads: int, window: int, widths: tuple[int, ...], tokens: int, device: Device, rows: int = 0,
    formats: tuple[MlaLayout, MlaLayout] = (V4, V4),
) -> int:  # fmt: skip
    """Bytes for any step of V4's layers, with as many compressed entries for a token as one of `widths` says.

    Layers without such entries have 0 of them. Up to `rows` entries are gathered. `formats`: of the window's entries
    and of the compressed ones.
    """

    def calls(tokens: int, pages: int) -> Iterable[Call]:
        # Beside a second pool entries stay packed, unless they are gathered.
        packed = (formats,) if all(widths) and not rows else (formats, (PLAIN_V4, PLAIN_V4))
        return (attention(first, heads, window, tokens, pages, n, second) for first, second in packed for n in widths)

    return max_workspace_bytes(calls, window, tokens, device, rows * PLAIN_V4.dims * 2)


def invariant_scratch(calls: Iterable[Call], device: Device) -> int:
    """Bytes that the splits of one token take with batch_invariant, in the largest of these calls for a token."""
    plans = (replace(call, attrs={**call.attrs, "batch_invariant": True}).plan(device) for call in calls)
    return max(plan.workspace_bytes for plan in plans)


def divide(reserved: int, a_token: int, tokens: int) -> tuple[int, int]:
    """Bytes of memory, at least those `reserved`, and the tokens of a call for which they are.

    With batch_invariant each token has as many splits, of `a_token` bytes, however many tokens there are.
    """
    if not a_token:
        return reserved, tokens
    reserved = max(reserved, ALIGNED * a_token)
    return reserved, whole_vectors(reserved // a_token)
