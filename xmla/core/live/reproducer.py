"""Files that repeat one call on few rows: a line of JSON, then the arrays' bytes. `xmla replay FILE` runs them."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from xmla.core.config import settings
from xmla.core.errors import ArgumentError
from xmla.core.op import Op
from xmla.core.requests import requests_of
from xmla.core.spec import DTYPES, row_major

MAX_FILES = 16  # in the folder: a call that fails once fails in every layer and step
LARGEST_SPAN = 1 << 28  # the most bytes that a strided array may span

# Copies to the host the elements of an array's first axis at the given places, or all.
Take = Callable[[Any, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Reproducer:
    """One call that failed, with the package versions it failed with."""

    by: str
    op: str
    arrays: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    failure: str
    versions: Mapping[str, str]


def has_tokens(op: Op, name: str) -> bool:
    """Whether an argument has one row per token."""
    return op.tensors[name].names[0] == "T"


def _has_requests(op: Op, name: str) -> bool:
    """Whether an argument has one row per request."""
    return op.tensors[name].names[0] == "B"


def shrink(
    op: Op, arrays: Mapping[str, Any], rows: np.ndarray | None, take: Take
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The same call on the host for few tokens, with only the requests and pages that they use, renumbered.

    `rows` are the tokens wanted (None: all). The tokens of the result, returned with the arrays, may be more: without
    request ids, requests stay whole. Nothing else leaves the device. Invalid values stay invalid. A call
    that sums over tokens stays whole, and one whose tokens read what others write has all of them.
    """
    if op.sums_over_tokens:
        return {name: take(array, None).copy() for name, array in arrays.items()}, None
    if op.reads_what_it_writes:
        rows = None
    caches = [name for name in op.pools if name in arrays]
    requests = None
    if "block_table" in arrays and rows is not None:
        total, tokens = arrays["block_table"].shape[0], arrays[next(n for n in arrays if has_tokens(op, n))].shape[0]
        owners = requests_of({}, tokens, total)
        owner = take(arrays["request_ids"], rows) if "request_ids" in arrays else owners[rows]
        requests = np.unique(owner[(owner >= 0) & (owner < total)])
        if "request_ids" not in arrays:
            rows = np.flatnonzero(np.isin(owners, requests))
    small = {
        name: take(array, rows if has_tokens(op, name) else requests if _has_requests(op, name) else None).copy()
        for name, array in arrays.items()
        if name not in caches
    }
    if requests is not None and "request_ids" in small:
        ids = small["request_ids"]
        small["request_ids"] = np.where(np.isin(ids, requests), np.searchsorted(requests, ids), ids).astype(ids.dtype)
    whole = dict(small)  # as long as caches behind one table share its page ids
    for name in caches:
        indices = [index for index in op.indices_of(name) if index in small]
        if not indices:
            small[name] = take(arrays[name], None)
            continue
        pages, entries, _ = arrays[name].shape
        uses: dict[str, tuple[int, np.ndarray, np.ndarray, np.ndarray]] = {}
        for index in indices:
            by_page = len(op.tensors[index].index_of.split()) == 1
            size = 1 if by_page else entries
            values = whole[index].astype(np.int64)
            named = (values >= 0) & (values < pages * size)
            read = named
            if by_page and "lengths" in small:  # page ids past the lengths are never read
                read = named & (np.arange(values.shape[1]) * entries < small["lengths"].max(initial=0))
            uses[index] = size, values, named, read
        used = np.unique(np.concatenate([values[read] // size for size, values, _, read in uses.values()]))
        small[name] = take(arrays[name], used)
        for index, (size, values, named, read) in uses.items():
            renumbered = np.searchsorted(used, values // size) * size + values % size
            others = np.where(named, -1, values)
            small[index] = np.where(read, renumbered, others).astype(small[index].dtype)
    return {name: small[name] for name in arrays}, rows


def save(
    by: str,
    op: str,
    arrays: Mapping[str, np.ndarray],
    attrs: Mapping[str, Any],
    failure: str,
    strides: Mapping[str, tuple[int, ...] | None],
) -> str:
    """Save a call that failed XMLA_CHECK or XMLA_SHADOW; return the command that repeats it, or why there is none.

    `strides` are those of the whole arrays, in elements (None: dense): kernels are compiled for them.
    """
    entries = [
        {"name": n, "dtype": a.dtype.name, "shape": a.shape, "strides": strides[n] or row_major(a.shape)}
        for n, a in arrays.items()
    ]
    versions = {"python": platform.python_version(), **{name: version(name) for name in ("triton", "numpy")}}
    head = {"op": op, "by": by, "failure": failure, "attrs": dict(attrs), "versions": versions, "arrays": entries}
    content = json.dumps(head).encode() + b"\n" + b"".join(array.tobytes() for array in arrays.values())
    folder = settings.reproducer_dir
    file = folder / f"{op}-{hashlib.sha256(content).hexdigest()[:12]}.xmla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.exists() and len(list(folder.glob("*.xmla"))) >= MAX_FILES:
            return f"no reproducer: {folder} holds {MAX_FILES} already"
        file.write_bytes(content)
    except OSError as error:
        return f"no reproducer: {error}"
    return f"xmla replay {file}"


def _with_strides(array: np.ndarray, strides: Sequence[int]) -> np.ndarray:
    """A copy with these strides, in elements, and NaN between the rows; dense where that would be too long."""
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    if not array.size or span * array.itemsize > LARGEST_SPAN:
        return array.copy()
    buffer = np.full(span * array.itemsize, 0xFF, np.uint8)
    placed = np.ndarray(array.shape, array.dtype, buffer.data, 0, [s * array.itemsize for s in strides])
    placed.view(f"u{array.itemsize}")[...] = array.view(f"u{array.itemsize}")
    return placed


def load(file: Path) -> Reproducer:
    """Read a file that `save` wrote.

    Raises:
        ArgumentError: The file is not a reproducer.
    """
    try:
        head, _, content = file.read_bytes().partition(b"\n")
        facts = json.loads(head)
        arrays, at = {}, 0
        for entry in facts["arrays"]:
            dtype = DTYPES[entry["dtype"]][0]
            nbytes = int(np.prod(entry["shape"], dtype=np.int64)) * dtype.itemsize
            dense = np.frombuffer(content[at : at + nbytes], dtype).reshape(entry["shape"])
            arrays[entry["name"]] = _with_strides(dense, entry["strides"])
            at += nbytes
        return Reproducer(facts["by"], facts["op"], arrays, facts["attrs"], facts["failure"], facts["versions"])
    except OSError as error:
        raise ArgumentError(f"replay: {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ArgumentError(f"replay: {file} is no reproducer: not what XMLA_CHECK or XMLA_SHADOW writes") from None
