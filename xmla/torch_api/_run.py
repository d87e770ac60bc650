"""Runs plans on torch tensors. A call is prepared once, and the result is kept for calls of the same shapes."""

from collections.abc import Sequence
from typing import Any

import torch

from xmla.core.config import settings
from xmla.core.debug import shadow
from xmla.core.debug.checks import check_values
from xmla.core.op import Op, check_overlap, disjoint_check, spaces
from xmla.core.plan import Plan
from xmla.core.values import DTYPES, Attributes
from xmla.torch_api import _prepared, _private
from xmla.torch_api._arrays import device_of, spec_of, take, to_numpy
from xmla.torch_api._checks import (
    Tensors,
    by_name,
    check_fork,
    check_memory,
    check_out,
    check_placed,
    check_tensors,
    check_workspace,
    written_names,
)
from xmla.torch_api._launch import profiler_hooks, sequential_launcher
from xmla.torch_api._prepared import Prepared, loaded, present_specs, recall, remember


def accepts_out(prepared: Prepared, out: Sequence[torch.Tensor]) -> bool:
    """Whether `check_out`, `check_placed` and `check_memory` would accept `out`, in a tenth of their time."""
    try:
        if prepared.same_out is None or [t for t in out if t.is_nested] or not prepared.same_out(*out):
            for tensor, (shape, strides, dtype) in zip(out, prepared.results, strict=True):
                if (
                    tensor.layout is not torch.strided
                    or tensor.is_nested
                    or tensor.is_meta
                    or tensor.shape != shape
                    or (tensor.stride() != strides and 0 not in shape)
                    or tensor.dtype is not dtype
                    or tensor.get_device() != prepared.ordinal
                ):
                    return False
            prepared.same_out = _private.comparison(out)
        return not [t for t in out if (address := t.data_ptr()) % 16 or not (address or t.numel() == 0)]
    except (AttributeError, RuntimeError):  # no tensor, or one without a storage
        return False


def accepts_workspace(prepared: Prepared, workspace: torch.Tensor) -> bool:
    """Whether `check_workspace` and `check_memory` have accepted a workspace like this one."""
    same = prepared.same_workspace
    if same is None or getattr(workspace, "is_nested", True) or not same(workspace):
        return False
    address = workspace.data_ptr()
    return address != 0 and not address % 16


def call(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Sequence[torch.Tensor] = (),
    workspace: torch.Tensor | None = None, implementation: str | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run `op` on real tensors, on the current stream; its results, allocated unless given as `out`."""
    recalled = recall(op, tensors, attrs, implementation)
    if recalled is not None:
        return run(op, tensors, *recalled, out, workspace)
    return look_up(op, tensors, attrs, out, workspace, implementation)


def look_up(
    op: Op, tensors: Tensors, attrs: tuple[Any, ...], out: Sequence[torch.Tensor] = (),
    workspace: torch.Tensor | None = None, implementation: str | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run a call that `recall` has not found: one whose sizes came before, or are of a family that is kept, or new."""
    try:
        depends_on, sizes, pointers = _prepared.read(op, tensors, attrs, implementation)
        ordinal = tensors[0].get_device()  # −1 on the CPU
        elsewhere = ordinal >= 0 and ordinal != _private.current_device()
    except AttributeError:
        check_tensors(op, tensors)
        raise
    except RuntimeError:
        check_tensors(op, tensors)
        check_fork(op)
        check_memory(op, by_name(op, tensors))
        raise
    if elsewhere:
        with torch.cuda.device(ordinal):
            return call(op, tensors, attrs, out, workspace, implementation)
    cache = _prepared.call_cache
    try:
        kind = cache.kind(depends_on)
    except TypeError:  # an attribute that cannot be hashed
        return call(op, tensors, op.attributes(*attrs), out, workspace, implementation)
    prepared = cache.find(kind, sizes)
    if prepared is None:
        prepared = _prepared.prepare(op, tensors, attrs, implementation, kind, sizes)
        cache.add(kind, sizes, prepared)
    else:  # not at its first call: many sizes never come again
        remember(op, tensors, attrs, implementation, prepared)
    return run(op, tensors, prepared, pointers, out, workspace)


def run(
    op: Op, tensors: Tensors, prepared: Prepared, pointers: list[int], out: Sequence[torch.Tensor] = (),
    workspace: torch.Tensor | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """Run a prepared call on tensors whose pointers are given."""
    taken = None
    if settings.live:
        taken = _check_and_sample(op, tensors, op.Values(*prepared.attrs))

    allocate = _private.empty_strided_cpu if prepared.ordinal < 0 else _private.empty_strided_cuda
    try:
        results, space = out, workspace
        if not out:
            results = [allocate(*result) for result in prepared.results]
        elif not accepts_out(prepared, out):
            check_out(op, prepared.result_specs, out, tensors[0].device)
            check_placed(op, out)
            check_memory(op, written_names(op, out))
        if workspace is not None:
            if not accepts_workspace(prepared, workspace):
                check_workspace(op, workspace, prepared.workspace_bytes, tensors[0].device)
                check_memory(op, {"workspace": workspace})
                prepared.same_workspace = _private.comparison([workspace])
        elif prepared.workspace_bytes:
            space = allocate((prepared.workspace_bytes,), (1,), torch.uint8)
    except torch.OutOfMemoryError as error:
        error.add_note(f"{op.name}: results {prepared.results} and {prepared.workspace_bytes} bytes of workspace")
        raise
    if prepared.mutated or out:
        _check_overlap(op, tensors, prepared, pointers, out, workspace)
        # Autograd then refuses a backward that saved their old values.
        _private.increment_version([*(tensors[place] for place in prepared.mutated), *out])
    if prepared.ordinal < 0:
        if prepared.plan is None:
            prepared.plan = prepared.family.plan_of(*prepared.sizes)  # pyrefly: ignore
        _interpret(op, prepared.plan, tensors, results, space)
    else:
        _launch(op, tensors, prepared, pointers, results, space)
    if taken is not None:
        shadow.compare(taken, by_name(op, tensors), results, take)
    return results


def _check_overlap(
    op: Op, tensors: Tensors, prepared: Prepared, pointers: list[int], out: Sequence[torch.Tensor],
    workspace: torch.Tensor | None,
) -> None:  # fmt: skip
    """Refuse a call that writes what it reads. Whether it does depends on addresses, which no earlier call tells."""
    addresses = [*pointers, *[tensor.data_ptr() for tensor in out]]
    if workspace is not None and prepared.workspace_bytes:
        addresses.append(workspace.data_ptr())
    family = prepared.family
    disjoint = family.disjoint.get(len(addresses))
    if disjoint is None:
        disjoint = family.disjoint[len(addresses)] = disjoint_check(family.pairs, len(addresses))
    if not disjoint(prepared.distances, *addresses):
        arguments = present_specs(op, tensors)
        within = spaces(op, arguments, prepared.result_specs, prepared.workspace_bytes)
        check_overlap(op, dict([*within.items()][: len(addresses)]), addresses)


def _check_and_sample(op: Op, tensors: Tensors, attrs: Attributes) -> shadow.Sample | None:
    """XMLA_CHECK's validation of a call, and XMLA_SHADOW's sample of it; neither works while a graph is captured."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    present, device = by_name(op, tensors), device_of(tensors[0].device)
    if settings.check:
        check_values(op, {name: to_numpy(tensor.cpu()) for name, tensor in present.items()}, attrs, device)
    if not settings.shadow:
        return None
    specs = {name: spec_of(tensor) for name, tensor in present.items()}
    return shadow.sample(op, present, specs, attrs, take, device)


def _launch(
    op: Op, tensors: Tensors, prepared: Prepared, pointers: list[int], out: Sequence[torch.Tensor],
    workspace: torch.Tensor | None,
) -> None:  # fmt: skip
    stream = _private.current_stream(prepared.ordinal)
    enter, leave = profiler_hooks()
    if enter is None and prepared.launch_all is not None:
        prepared.launch_all(stream, pointers, out, workspace)
    else:
        family = prepared.family
        if family.in_turn is None:
            launches = loaded(family.starts, tensors[0].device)
            family.in_turn = sequential_launcher(launches, len(pointers), len(out))
        family.in_turn(prepared.numbers, stream, enter, leave, pointers, out, workspace)


def _interpret(
    op: Op, plan: Plan, tensors: Tensors, out: Sequence[torch.Tensor], workspace: torch.Tensor | None
) -> None:
    from xmla.core.compile import interpreter

    interpreter.require(op.name, plan)
    arrays = {name: to_numpy(t) for name, t in zip(op.tensors, tensors, strict=True) if t is not None}
    arrays |= {name: to_numpy(tensor) for name, tensor in zip(op.outputs, out, strict=True)}
    if workspace is not None:
        space = workspace.numpy()
        for name, offset in plan.workspace.items():
            spec = plan.buffers[name]
            arrays[name] = space[offset : offset + spec.nbytes].view(DTYPES[spec.dtype][0]).reshape(spec.shape)
    interpreter.run(op.name, plan, arrays)
