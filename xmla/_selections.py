"""Whether a rollout's selections fit the tokens that a trainer gives them to, for arrays of every framework.

A row [K] of a token has its keys in ascending order, counted from the first key that the token sees, and −1 behind the
last.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from xmla.core.errors import ArgumentError


def check_layers(layers: Iterable[int], selecting: Iterable[int]) -> None:
    """Raise ArgumentError unless exactly the layers have selections that select keys."""
    numbers, expected = sorted(layers), sorted(selecting)
    if numbers != expected:
        raise ArgumentError(f"selections: given for layers {numbers}, expected {expected}, which select keys")


def check_arrays(layers: Mapping[int, Any], array: type) -> None:
    """Raise ArgumentError unless the rows of every layer are an `array` of the framework."""
    for layer, rows in layers.items():
        if not isinstance(rows, array):
            raise ArgumentError(f"selections: layer {layer} is {type(rows).__name__}, expected {array.__name__}")


def check_form(layer: int, rows: Any, topk: int, tokens: tuple[int, ...] | None = None) -> None:
    """Raise ArgumentError unless rows are [batch, tokens, topk] int32, of so many `tokens` [batch, tokens]."""
    if str(rows.dtype).removeprefix("torch.") != "int32":
        raise ArgumentError(f"selections: layer {layer} has dtype {rows.dtype}, expected int32")
    if rows.ndim != 3 or rows.shape[2] != topk:
        raise ArgumentError(
            f"selections: layer {layer} has shape {tuple(rows.shape)}, expected [batch, tokens, {topk}]"
        )
    if tokens is not None and tuple(rows.shape[:2]) != tokens:
        raise ArgumentError(f"selections: layer {layer} has [batch, tokens] {tuple(rows.shape[:2])}, expected {tokens}")


def check_rows(layer: int, rows: Any, counts: Any, needed: Any) -> None:
    """Check a layer's rows, whose values are read.

    Args:
        layer: Its number.
        rows: [B, S, K].
        counts: [B, S], keys that each token sees.
        needed: [B, S] bool, which tokens have to have keys. Those that have any have as many as an indexer selects.

    Raises:
        ArgumentError: A token has a key that it does not see, keys that do not ascend, or too few.
    """
    topk = rows.shape[2]
    selected = (rows >= 0).sum(-1)
    whole = (selected == counts) | ((counts > topk) & (selected == topk)) | ((counts <= 0) & (selected == 0))
    ascending = (rows[..., 1:] > rows[..., :-1]) | (rows[..., 1:] == -1)
    for what, where in (
        ("keys that it does not see", ((rows >= 0) & (rows >= counts[..., None])).any(-1)),
        ("keys out of order, or twice", ~ascending.all(-1) | (rows[..., 0] < -1)),
        ("another number of keys", ~whole & (needed | (selected > 0))),
    ):
        if where.any():
            sequence, token = divmod(int((where * 1).reshape(-1).argmax()), where.shape[1])
            sees = int(counts[sequence, token])
            raise ArgumentError(
                f"selections: layer {layer}, sequence {sequence}, token {token} has {what}: "
                f"{int(selected[sequence, token])} keys up to {int(rows[sequence, token].max())}, expected "
                f"{max(0, min(sees, topk))} below {sees}, ascending and −1 behind them"
            )
