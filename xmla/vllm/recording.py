"""Selections of requests, which a trainer asks the workers for: XMLA_SELECTIONS_GIB and `save_selections`.

A worker follows by vLLM's own messages which pages a request has. When one ends its rows are copied, before a step may
write those of others to the same slots. The first rank of tensor parallelism records, for all select alike; stages of
pipeline parallelism each have their layers.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmla.core.config import settings
from xmla.core.errors import ArgumentError
from xmla.vllm.refusals import refuse
from xmla.vllm.rows import GIB, Rows

SUFFIX = "(-[0-9a-f]{8})?"  # that vLLM gives a request's name


class Recording:
    """The rows of a worker's layers and the pages of its requests.

    Args:
        rows: Of all layers that record.
        page: Slots of a page.
        group: Which of a request's block tables has the pages of these layers.
    """

    def __init__(self, rows: Rows, page: int, group: int) -> None:
        self.rows, self.page, self.group = rows, page, group
        self.pages: dict[str, list[int]] = {}
        self.tokens: dict[str, int] = {}  # whose rows are written once the steps so far have run
        self.taken: set[str] = set()

    def follow(self, step: Any) -> None:
        """Take over what a step's message says of requests, before the step runs."""
        if ended := step.finished_req_ids & self.pages.keys():
            wait()
        for name in ended:
            if name not in self.taken:
                self.rows.end(name, self.slots(name))
        for name in {*ended, *(step.preempted_req_ids or ())}:
            self.pages.pop(name, None)
            self.tokens.pop(name, None)
            self.taken.discard(name)
        if copies := step.kv_cache_block_copies:
            self.rows.copy_pages(self.page, copies)
        for new in step.scheduled_new_reqs:
            self.pages[new.req_id] = [*new.block_ids[self.group]]
            self.tokens[new.req_id] = new.num_computed_tokens
        known = step.scheduled_cached_reqs
        for name, pages, before in zip(known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True):
            if name in known.resumed_req_ids:
                self.pages[name] = []
            if pages is not None:
                self.pages[name] += pages[self.group]
            self.tokens[name] = before
        for name, count in step.num_scheduled_tokens.items():
            self.tokens[name] += count

    def slots(self, name: str) -> torch.Tensor:
        """Slots [n] of a request's tokens; of drafts too, which may have been rejected."""
        offsets = torch.arange(self.page)
        slots = (torch.tensor(self.pages[name], dtype=torch.int64)[:, None] * self.page + offsets).flatten()
        return slots[: self.tokens[name]]

    def take(self, name: str, tokens: int) -> dict[int, np.ndarray]:
        """Rows of the first `tokens` tokens of a request by each layer's number, once."""
        pattern = re.compile(re.escape(name) + SUFFIX)
        known = [each for each in (*self.rows.ended, *self.pages) if pattern.fullmatch(each) and each not in self.taken]
        if not known:
            raise ArgumentError(
                f"save_selections: no rows of request {name}, expected one whose rows were not taken, and did not make "
                "room for those of others"
            )
        if len(known) > 1:
            raise ArgumentError(f"save_selections: request {name} is one of {', '.join(known)}, expected one name")
        (whole,) = known
        if whole in self.rows.ended:
            rows = self.rows.checked(name, self.rows.ended[whole], tokens)
            del self.rows.ended[whole]
            return rows
        wait()
        rows = self.rows.checked(name, self.rows.read(self.slots(whole)), tokens)
        self.taken.add(whole)  # vLLM tells that it has ended in a later step, if there is one
        return rows


def start(worker: Any) -> Recording | None:
    """Record from now on what a worker's layers select; None if nobody asks for it, or another rank does it.

    Raises:
        ArgumentError: XMLA_SELECTIONS_GIB is less than the rows of all slots take.
        UnsupportedError: The layers' caches are not of one table.
    """
    if not settings.selections_gib:
        return None
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.logger import init_logger
    from vllm.model_executor.models.utils import extract_layer_index

    if not get_tp_group().is_first_rank:
        return None
    config = worker.vllm_config
    model = config.model_config.hf_text_config
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if name.endswith(".indexer.k_cache") and extract_layer_index(name) < model.num_hidden_layers  # no drafts
    }
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    of_layers = [place for place, group in enumerate(groups) if {*group.layer_names} & layers.keys()]
    refuse({"recorded selections of layers with several block tables": len(of_layers) > 1})
    numbers = [extract_layer_index(name) for name in layers]
    caches = [layer.kv_cache for layer in layers.values()]
    rows = Rows(numbers, caches[0].shape[0] * caches[0].shape[1], model.index_topk, settings.selections_gib, on_device)
    init_logger("vllm.xmla").info(
        "xmla: %s, of pinned memory; %.2f GiB are left for requests that have ended",
        rows.summary,
        rows.room / GIB,
    )
    for number, layer in zip(numbers, layers.values(), strict=True):
        layer.xmla_selections = rows.views[number]
    (group,) = of_layers
    return Recording(rows, groups[group].kv_cache_spec.block_size, group)


def on_device(rows: torch.Tensor) -> torch.Tensor:
    """Memory of the host as the device writes it."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    if not current_platform.is_cuda():
        return rows
    pin_tensor(rows)  # as large as it is: torch would round up to a power of two
    return get_accelerator_view_from_cpu_tensor(rows)


def wait() -> None:
    """Wait for what the device still writes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def record_in(worker: Any) -> None:
    """Let vLLM's worker record what its layers select where XMLA_SELECTIONS_GIB asks for it.

    Methods are replaced, not the class, from which a user's own worker may have been derived before.
    """
    warm_up, execute = worker.compile_or_warm_up_model, worker.execute_model

    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.xmla_recording = start(self)  # before graphs are captured
        return warm_up(self, *args, **kwargs)

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.xmla_recording is not None:
            self.xmla_recording.follow(scheduler_output)
        return execute(self, scheduler_output, *args, **kwargs)

    worker.xmla_recording = None
    for method in (compile_or_warm_up_model, execute_model, save_selections):
        setattr(worker, method.__name__, method)


def save_selections(self: Any, request_id: str, tokens: int, folder: str) -> list[int]:
    """Save what each layer selected for the first tokens of a request, once, and return the layers' numbers.

    A worker's method. A layer's is [tokens, index_topk] int32, in the folder's file of its number, such as 3.npy. vLLM
    hands no arrays from its processes to a program.

    Raises:
        ArgumentError: Nothing is recorded, or not so much of this request.
    """
    if not settings.selections_gib:
        raise ArgumentError("save_selections: nothing is recorded, expected XMLA_SELECTIONS_GIB")
    rows = {} if self.xmla_recording is None else self.xmla_recording.take(request_id, tokens)
    for layer, each in rows.items():
        np.save(Path(folder, f"{layer}.npy"), each)
    return [*rows]
