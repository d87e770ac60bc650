"""Files that repeat one call on few rows: a line of JSON, then the arrays' bytes. `xmla replay FILE` runs them."""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from reprlib import repr as shortened
from threading import get_ident
from typing import Any

import numpy as np

from xmla.core.call import requests_of
from xmla.core.config import settings
from xmla.core.errors import ArgumentError
from xmla.core.op import Op
from xmla.core.registry import find_op
from xmla.core.values import DTYPES, row_major
from xmla.core.versions import installed

CHECKS = ("XMLA_CHECK", "XMLA_SHADOW")
PACKAGES = ("triton", "numpy", "torch", "jax", "jaxlib", "jax-triton")
MAX_FILES = 16  # in the folder: a call that fails once fails in every layer and step
LARGEST_SPAN = 1 << 28  # the most bytes that a strided array may span

# Copies to the host the elements of an array's first axis at the given places, or all.
Take = Callable[[Any, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class Reproducer:
    """One call that failed, with the device and the package versions it failed with."""

    by: str
    op: Op
    arrays: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    failure: str
    device: str
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
    """A call's arrays on the host for few of its tokens, with only the requests and pages that they use, renumbered.

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
    device: str,
) -> str:
    """Save a call that failed XMLA_CHECK or XMLA_SHADOW; return the command that repeats it, or why there is none.

    `strides` are those of the whole arrays, in elements (None: dense): kernels are compiled for them.
    """
    entries = [
        {"name": n, "dtype": a.dtype.name, "shape": a.shape, "strides": strides[n] or row_major(a.shape)}
        for n, a in arrays.items()
    ]
    packages = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    own = import_module("xmla").__version__  # which imports this module
    head = {
        "op": op, "by": by, "failure": failure, "attrs": dict(attrs), "device": device,
        "versions": {"xmla": own, "python": platform.python_version(), **packages}, "arrays": entries,
    }  # fmt: skip
    content = json.dumps(head).encode() + b"\n" + b"".join(array.tobytes() for array in arrays.values())
    name = f"{op}-{hashlib.sha256(content).hexdigest()[:12]}.xmla"
    try:
        _write(settings.reproducer_dir, name, content)
    except OSError as error:
        return f"no reproducer: {error}"
    return f"xmla replay {settings.reproducer_dir / name}"


def _write(folder: Path, name: str, content: bytes) -> None:
    """Write a file that nobody else reads, whole or not at all, in a folder that nobody else has made.

    The folder may be one for temporary files, where anybody makes folders and links of any name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(0o700, exist_ok=True)
    if folder.is_symlink():
        raise OSError(f"{folder} is a link, expected a folder")
    inside = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if (owner := os.fstat(inside).st_uid) != os.geteuid():
            raise PermissionError(f"{folder} belongs to user {owner}, expected one's own")
        names = [other for other in os.listdir(inside) if other.endswith(".xmla")]
        if name not in names and len(names) >= MAX_FILES:
            raise OSError(f"{folder} holds {MAX_FILES} already")
        partial = f".{name}.{os.getpid()}.{get_ident()}"
        opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=inside)
        try:
            with open(opened, "wb") as file:
                file.write(content)
            os.rename(partial, name, src_dir_fd=inside, dst_dir_fd=inside)
        except OSError:
            os.unlink(partial, dir_fd=inside)
            raise
    finally:
        os.close(inside)


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
        ArgumentError: The file is not a reproducer, or one of an op, argument or attribute that there is not; the
            message names what of it is wrong.
    """

    def require(right: bool, what: str, got: object, expected: str) -> None:
        if not right:
            raise ArgumentError(f"replay: {file} is no reproducer: {what} is {shortened(got)}, expected {expected}")

    def text(what: str, got: object) -> str:
        require(isinstance(got, str) and got.isprintable(), what, got, "printable text")
        return str(got)

    try:
        head, _, content = file.read_bytes().partition(b"\n")
    except OSError as error:
        raise ArgumentError(f"replay: {file} cannot be read: {error.strerror}") from None
    facts: Any = head  # told as it is if it is no JSON
    with suppress(ValueError, RecursionError):
        facts = json.loads(head)
    require(isinstance(facts, dict), "its first line", facts, "a JSON object of what XMLA_CHECK or XMLA_SHADOW saw")
    by, failure, device = (text(name, facts.get(name)) for name in ("by", "failure", "device"))
    require(by in CHECKS, "by", by, " or ".join(CHECKS))
    op = find_op(text("op", facts.get("op")), "replay")
    for name, kind, expected in (
        ("attrs", dict, "an object"), ("versions", dict, "an object"), ("arrays", list, "a list")
    ):  # fmt: skip
        require(isinstance(facts.get(name), kind), name, facts.get(name), expected)
    for name, value in facts["attrs"].items():
        require(name in op.defaults, "a name in attrs", name, f"one of {op.name}: {', '.join(op.defaults)}")
        require(not isinstance(value, str) or value.isprintable(), f"attrs {name}", value, "printable text")
    attrs = op.attributes(**facts["attrs"])._asdict()
    versions = {text("a name in versions", name): text(f"versions {name}", v) for name, v in facts["versions"].items()}
    arrays: dict[str, np.ndarray] = {}
    for entry in facts["arrays"]:
        require(isinstance(entry, dict), "an entry of arrays", entry, "an object")
        name = text("a name in arrays", entry.get("name"))
        require(name in op.tensors, "a name in arrays", name, f"one of {op.name}: {', '.join(op.tensors)}")
        require(name not in arrays, "arrays", f"two of {name}", "one of each name")
        kind, shape, strides = (entry.get(key) for key in ("dtype", "shape", "strides"))
        require(isinstance(kind, str) and kind in DTYPES, f"{name} dtype", kind, " or ".join(DTYPES))
        for what, numbers in (("shape", shape), ("strides", strides)):
            rank = len(op.tensors[name].names)
            right = isinstance(numbers, list) and len(numbers) == rank and all(type(n) is int for n in numbers)
            right = right and all(0 <= n < 1 << 63 for n in numbers)
            require(right, f"{name} {what}", numbers, f"{rank} numbers from 0 to 2**63 - 1")
        dtype = DTYPES[kind][0]
        nbytes = prod(shape) * dtype.itemsize
        require(nbytes <= len(content), f"what is left for {name}", f"{len(content)} bytes", f"{nbytes} of its shape")
        try:
            dense = np.frombuffer(content[:nbytes], dtype).reshape(shape)
            arrays[name] = _with_strides(dense, strides)
        except (ValueError, OverflowError) as error:  # of no elements, but more than NumPy counts
            require(False, f"{name} shape", shape, f"one of an array: {error}")
        content = content[nbytes:]
    require(not content, "what follows the arrays", f"{len(content)} bytes", "nothing")
    return Reproducer(by, op, arrays, attrs, failure, device, versions)
