"""vLLM's sleep mode without a GPU: what its allocator does to memory, done to what torch allocates on the CPU.

vLLM's own worker, executor and backend of the mode decide what is kept, discarded and loaded again.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """vLLM's `MemAllocator`. It knows the storages that are allocated inside `use_memory_pool`, by its tag.

    Memory that sleep does not keep is NaN in every float, and indices far outside of everything, until it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tag: str | None = None
        self.made: dict[StorageWeakRef, str] = {}
        self.kept: dict[StorageWeakRef, torch.Tensor] = {}
        self.discarded: Counter[str] = Counter()  # bytes by tag

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        outer, self.tag = self.tag, tag
        with nullcontext() if outer else self:
            yield
        self.tag = outer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set() if function is torch.ops.aten.lift_fresh.default else {*storages((args, kwargs))}
        made = function(*args, **(kwargs or {}))
        assert self.tag is not None
        self.made |= dict.fromkeys((ref for ref in storages(made) if ref not in given), self.tag)
        return made

    def sleep(self, offload_tags: tuple[str, ...]) -> None:
        for ref, tag in self.made.items():
            content = bytes_of(ref)
            if tag in offload_tags:
                self.kept[ref] = content.clone()
            else:
                self.discarded[tag] += content.numel()
            content[0::2], content[1::2] = 0xFF, 0x7F

    def wake_up(self, tags: list[str] | None = None) -> None:
        from vllm.device_allocator import DEFERRABLE_TAGS

        for ref in [*self.kept]:
            tag = self.made[ref]
            if tags is None or tag in tags or tag not in DEFERRABLE_TAGS:
                bytes_of(ref).copy_(self.kept.pop(ref))

    def get_current_usage(self) -> int:
        return sum(bytes_of(ref).numel() for ref in self.made)


def storages(values: Any) -> list[StorageWeakRef]:
    """Storages of the tensors among `values` that have memory."""
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu")
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def bytes_of(ref: StorageWeakRef) -> torch.Tensor:
    """The bytes of a storage; none if it was freed."""
    empty = torch.empty(0, dtype=torch.uint8)
    return empty if ref.expired() else empty.set_(torch.UntypedStorage._new_with_weak_ptr(ref.cdata))


MEMORY = Memory()


def pool(worker: Any, tag: str) -> AbstractContextManager[None]:
    """Stands for `_maybe_get_memory_pool_context` of vLLM's worker."""
    return MEMORY.use_memory_pool(tag) if worker.model_config.enable_sleep_mode else nullcontext()


def install() -> None:
    """Memory is not unmapped, so that its size stays."""
    from vllm import device_allocator

    device_allocator.get_mem_allocator_instance = lambda: MEMORY
    torch.accelerator.synchronize = lambda *_: None
    torch.accelerator.get_memory_info = lambda *_: (0, 0)
