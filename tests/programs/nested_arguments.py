"""A nested tensor of strided layout in each argument, result and workspace of each op, after a good call of it.

Torch's comparison of tensors ends the process at one, so that this runs in a process of its own. Usage:
python nested_arguments.py cpu.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import kit

from xmla import ArgumentError
from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.torch_api._all_ops import TORCH_OPS


def nested(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor  # which none can have
    return torch.nested.nested_tensor([tensor.reshape(-1)])


def arguments_of(op: Op, device: str, place: int = -1) -> list[torch.Tensor | None]:
    """Arguments of the op's first case, of which the one at `place` is nested."""
    arguments = kit.torch_inputs(op, kit.copies(kit.make(op.cases[0])), device)
    return [nested(tensor) if i == place else tensor for i, tensor in enumerate(arguments)]


def call(op: Op, arguments: list[torch.Tensor | None], **options: Any) -> tuple[torch.Tensor, ...]:
    return kit.as_tuple(getattr(TORCH_OPS, op.name)(*arguments, **op.cases[0].attrs, **options))


def say_refusal(op: Op, arguments: list[torch.Tensor | None], **options: Any) -> None:
    try:
        call(op, arguments, **options)
        print(f"{op.name}: nothing refused")
    except ArgumentError as error:
        print(error)


def main(device: str) -> None:
    for op in registry().values():
        results = call(op, arguments_of(op, device))
        for place, tensor in enumerate(arguments_of(op, device)):
            if tensor is not None:
                say_refusal(op, arguments_of(op, device, place))
        if op.outputs:
            out = tuple(map(torch.clone, results))
            space = torch.empty(1 << 22, dtype=torch.uint8, device=device)
            call(op, arguments_of(op, device), out=out, workspace=space)
            for place in range(len(out)):
                mixed = tuple(nested(x) if i == place else x for i, x in enumerate(out))
                say_refusal(op, arguments_of(op, device), out=mixed, workspace=space)
            say_refusal(op, arguments_of(op, device), out=out, workspace=nested(space))


warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
main(sys.argv[1])
