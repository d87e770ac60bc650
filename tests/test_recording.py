"""Rows of an engine's requests, beside the slots of their keys: steps of vLLM's messages, without vLLM."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xmla import ArgumentError
from xmla.vllm import recording
from xmla.vllm.rows import GIB, Rows, write

PAGE, PAGES, K, LAYERS = 4, 12, 3, (0, 5)
SIZE = 4 * len(LAYERS) * (PAGES * PAGE + 1) * K


def wanted(seed: int, position: int, layer: int) -> list[int]:
    """What the token at a position of some request selects."""
    return [100 * seed + position, layer, -1]


class Engine:
    """Requests of which each step writes rows to their slots, and tells of them as vLLM does.

    `known` are those that the worker knows; a name has the suffix that vLLM gives it.
    """

    def __init__(self, room: int = 1 << 16) -> None:
        self.rows = Rows(LAYERS, PAGES * PAGE, K, (SIZE + room) / GIB, lambda host: host)
        self.recording = recording.Recording(self.rows, PAGE, group=1)
        self.pages: dict[str, list[int]] = {}

    def step(
        self, tokens: dict[str, tuple[int, int]], new: dict[str, list[int]], seeds: dict[str, int],
        ended: tuple[str, ...] = (), preempted: tuple[str, ...] = (), resumed: tuple[str, ...] = (),
        copies: list[tuple[int, int]] | None = None,
    ) -> None:  # fmt: skip
        """A step with (tokens before, tokens of the step) of requests, which get `new` pages."""
        known = [name for name in tokens if name in self.pages and name not in ended]
        fresh = [name for name in tokens if name not in known]
        self.recording.follow(
            SimpleNamespace(
                finished_req_ids={*ended}, preempted_req_ids={*preempted} or None, kv_cache_block_copies=copies,
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=name, block_ids=([], new[name]), num_computed_tokens=tokens[name][0])
                    for name in fresh
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=known, resumed_req_ids={*resumed}, num_computed_tokens=[tokens[name][0] for name in known],
                    new_block_ids=[([], new[name]) if name in new else None for name in known],
                ),
                num_scheduled_tokens={name: count for name, (_, count) in tokens.items()},
            )
        )  # fmt: skip
        for name in (*ended, *preempted):
            self.pages.pop(name, None)
        for name in tokens:
            self.pages[name] = ([] if name in resumed else self.pages.get(name, [])) + new.get(name, [])
        for layer, rows in self.rows.views.items():
            for name, (before, count) in tokens.items():
                places = range(before, before + count)
                slots = torch.tensor([self.pages[name][place // PAGE] * PAGE + place % PAGE for place in places] + [-1])
                made = torch.tensor([wanted(seeds[name], place, layer) for place in places] + [[7, 7, 7]])
                write(rows, slots, made.int())

    def check(self, name: str, tokens: int, seed: int, first: dict[int, int] | None = None) -> None:
        """Rows of a request; `first` has the seed of another one whose tokens it found in the cache."""
        taken = self.recording.take(name, tokens)
        for layer in LAYERS:
            want = [wanted((first or {}).get(place, seed), place, layer) for place in range(tokens)]
            assert np.array_equal(taken[layer], want)


def test_rows_of_chunks_of_a_cached_prefix_and_of_pages_that_others_get() -> None:
    engine, seeds = Engine(), {"a-00000001": 1, "b-00000002": 2, "c-00000003": 3}
    a, b, c = seeds
    engine.step({a: (0, 6)}, {a: [3, 7]}, seeds)
    engine.step({a: (6, 4), b: (4, 3)}, {a: [1], b: [3, 5]}, seeds)  # b's first page is a's
    engine.step({a: (10, 1), b: (7, 2)}, {b: [9]}, seeds)  # of two tokens one is a draft that is rejected
    engine.step({b: (8, 1), c: (0, 8)}, {c: [7, 1]}, seeds, ended=(a,))  # in pages that were a's
    engine.check("a", 11, 1)
    engine.check("b", 9, 2, dict.fromkeys(range(4), 1))  # it has ended, which no step has told
    engine.step({c: (8, 1)}, {c: [5]}, seeds, ended=(b,))
    assert not engine.rows.ended, "what was taken is not kept"
    engine.step({}, {}, seeds, ended=(c,))
    engine.check("c-00000003", 9, 3)


def test_rows_of_requests_that_lose_their_pages() -> None:
    """And come back, as a known request or a new one, by other pages, of which some are copied."""
    engine, seeds = Engine(), {"a": 1, "b": 2}
    engine.step({"a": (0, 5), "b": (0, 5)}, {"a": [0, 1], "b": [2, 3]}, seeds)
    engine.step({}, {}, seeds, preempted=("a", "b"))
    with pytest.raises(ArgumentError, match="no rows of request a, expected one whose rows were not taken"):
        engine.recording.take("a", 5)
    engine.pages["a"] = []  # known, as to vLLM's first runner
    engine.step({"a": (0, 6), "b": (4, 3)}, {"a": [4, 5], "b": [6, 3]}, seeds, resumed=("a",), copies=[(2, 6)])
    engine.check("a", 6, 1)
    engine.check("b", 7, 2)


def test_rows_that_nobody_takes_make_room() -> None:
    engine, seeds = Engine(room=2 * 4 * len(LAYERS) * 5 * K), {"a": 1, "b": 2, "c": 3}
    for place, name in enumerate(seeds):
        engine.step({name: (0, 5)}, {name: [2 * place, 2 * place + 1]}, seeds)
    engine.step({}, {}, seeds, ended=("a",))
    engine.step({}, {}, seeds, ended=("b",))
    engine.step({}, {}, seeds, ended=("c",))
    with pytest.raises(ArgumentError, match="no rows of request a, "):
        engine.recording.take("a", 5)
    engine.check("b", 5, 2)
    engine.check("c", 5, 3)
    with pytest.raises(ArgumentError, match="no rows of request c, "):
        engine.recording.take("c", 5)


def test_what_is_not_there_is_refused() -> None:
    told = (
        "expected at least 0.01: 0.00 GiB for selections: 2 layers, 48 tokens of the cache, 3 keys, 4 bytes; a smaller"
    )
    with pytest.raises(ArgumentError, match=f"XMLA_SELECTIONS_GIB is 1e-09, {told} cache takes less"):
        Rows(LAYERS, PAGES * PAGE, K, 1e-9, lambda host: host)
    engine, seeds = Engine(), {"a-00000001": 1, "a-00000002": 2, "b": 3}
    engine.step(dict.fromkeys(seeds, (0, 3)), {name: [place] for place, name in enumerate(seeds)}, seeds)
    with pytest.raises(ArgumentError, match="request a is one of a-00000001, a-00000002, expected one name"):
        engine.recording.take("a", 3)
    with pytest.raises(ArgumentError, match="request b has 3 tokens, expected 4"):
        engine.recording.take("b", 4)
    engine.recording.tokens["b"] = 4
    with pytest.raises(ArgumentError, match="request b has no selection of token 3 in layer 0"):
        engine.recording.take("b", 4)
    engine.check("b", 3, 3)


def test_a_worker_records_where_it_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Rows are saved by layers; ranks that record nothing save none."""
    Base = type("Base", (), {"compile_or_warm_up_model": lambda _: "warm", "execute_model": lambda _, step: step})
    engine = Engine()
    recording.record_in(Base)
    worker: Any = Base()
    with pytest.raises(ArgumentError, match="nothing is recorded, expected XMLA_SELECTIONS_GIB"):
        worker.save_selections("a", 1, str(tmp_path))
    monkeypatch.setattr(recording.settings, "selections_gib", 1.0)
    assert worker.save_selections("a", 1, str(tmp_path)) == []
    monkeypatch.setattr(recording, "start", lambda _: engine.recording)
    assert worker.compile_or_warm_up_model() == "warm"
    monkeypatch.setattr(engine.recording, "follow", lambda step: step.append("followed"))
    assert worker.execute_model([]) == ["followed"]
    monkeypatch.undo()
    engine.step({"a": (0, 2)}, {"a": [1]}, {"a": 1})
    monkeypatch.setattr(recording.settings, "selections_gib", 1.0)
    assert worker.save_selections("a", 2, str(tmp_path)) == [*LAYERS]
    assert np.load(tmp_path / "5.npy").tolist() == [wanted(1, 0, 5), wanted(1, 1, 5)]
