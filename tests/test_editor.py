"""What an editor tells of the installed package: types, wrong calls, completion, hover, the help in a call."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from conftest import require_tool
from test_wheel import make_wheel

from xmla.core.registry import public_ops

ROOT = Path(__file__).parent.parent
SECONDS = 1800  # of a language server that never answers; one that does takes some
PYREFLY = [sys.executable, "-m", "pyrefly"]
FIRST = """
from typing import reveal_type
import jax, numpy as np, torch
import xmla
from xmla import interop, jax_api, layouts, torch_api
from xmla.jax_api import parallel as jax_parallel
from xmla.torch_api import parallel as torch_parallel
from xmla.core.parallel import Ownership
t, j, n, ref = torch.ones(3), jax.numpy.ones(3), np.ones(3), jax.new_ref(np.ones(3))
context = torch_parallel.ContextParallel(torch.distributed.DeviceMesh("cpu", [0]), Ownership(1, 64))
"""
TYPES = {
    "torch_api.sparse_mla(t, t, t, softmax_scale=1.0)": "tuple[Tensor, Tensor]",
    "torch_api.sparse_mla(t, t, t, sink=t, softmax_scale=1, out=(t, t), workspace=t)": "tuple[Tensor, Tensor]",
    "torch_api.sparse_mla.plan(t, t, t, softmax_scale=1.0, implementation='gluon').workspace_bytes": "int",
    "torch_api.sparse_mla.plan(t, t, t, softmax_scale=1.0, out=(t, t), workspace=t).workspace_bytes": "int",
    "torch_api.select_topk(t, t, k=8, out=t)": "Tensor",
    "torch_api.write_indexer_cache(t, t, t)": "None",
    "jax_api.sparse_mla(j, ref, n, softmax_scale=1.0)": "tuple[Array, Array]",
    "jax_api.select_topk(j, n, k=8)": "Array",
    "jax_api.write_indexer_cache(j, j, j)": "Array",
    "jax_api.write_indexer_cache(j, j, ref)": "None",
    "jax_api.compress_kv(j, j, j, j, j, j, ref, j, j, j)": "Array",
    "jax_api.compress_kv(j, j, j, j, j, j, j, j, j, j)": "tuple[Array, Array]",
    "jax_api.EXPORT_CHECKS": "tuple[DisabledSafetyCheck]",
    "jax_parallel.ContextParallel.merge": "(self: ContextParallel, out: Array, lse: Array, sink: Array | None = None, "
    "*, scatter_heads: bool = False) -> tuple[Array, Array]",
    "context.select(t, t, t, context.batch(t, t), k=8)": "Tensor",
    "context.ownership.count(t, 0)": "Tensor",
    "context.group": "ProcessGroup",
    "interop.to_jax(t)": "Array",
    "interop.to_torch(j)": "Tensor",
    "layouts.convert(n, 'v4')": "ndarray",
    "layouts.convert(t, 'v4')": "Tensor",
    "layouts.inspect(j).format": "str | None",
    "xmla.layouts.convert(j, 'v4')": "Array",
    "xmla.supports('sparse_mla', 'H200', H=16).ok": "bool",
    "xmla.compiles()[0].seconds": "float",
    "xmla.warmup(xmla.ModelConfig(heads=16), progress=False).seconds": "float",
    "xmla.model_config('deepseek_v4', tensor_parallel=8, next_n=(1, 4)).max_lens": "tuple[int, ...]",
    "xmla.warmup(xmla.ModelConfigV4(next_n=(1, 2)), xmla.Device.of('NVIDIA H200', 90, 132), workers=2)": "Warmup",
}
ERRORS = {
    "torch_api.sparse_mla(t, t, t, softmax_scal=1.0)": "Unexpected keyword argument `softmax_scal`",
    "torch_api.sparse_mla(t, t, softmax_scale=1.0)": "Missing argument `slots`",
    "torch_api.sparse_mla(t, t, t)": "Missing argument `softmax_scale`",
    "torch_api.sparse_mla(t, t, n, softmax_scale=1.0)": "parameter `slots` with type `Tensor`",
    "torch_api.sparse_mla(t, t, t, softmax_scale=1.0, out=t)": "parameter `out` with type `tuple[Tensor, Tensor]",
    "torch_api.sparse_mla(t, t, t, softmax_scale=1.0, implementation='cuda')": "parameter `implementation`",
    "torch_api.select_topk(t, t, k=8, implementation='gluon')": "parameter `implementation`",
    "torch_api.sparse_mla.plan(t, t, t, softmax_scal=1.0)": "Unexpected keyword argument `softmax_scal`",
    "torch_api.sparse_mla.plan(t, t, softmax_scale=1.0)": "Missing argument `slots`",
    "torch_api.sparse_mla.plan(t, t, t, softmax_scale=1.0, out=t)": "parameter `out` with type `tuple[Tensor, Tensor]",
    "torch_api.write_indexer_cache(t, t, t, out=t)": "parameter `out` with type `None`",
    "torch_api.sparse_mIa": "No attribute `sparse_mIa` in module `xmla.torch_api`",
    "torch_api.sparse_mla_backward": "No attribute `sparse_mla_backward` in module `xmla.torch_api`",
    "jax_api.select_topk(j, j, n=8)": "Unexpected keyword argument `n`",
    "jax_api.select_topk(j, k=8)": "Missing argument `ends`",
    "jax_api.select_topk(t, j, k=8)": "parameter `logits` with type `Array | ndarray`",
    "jax_api.select_topk(j, j, k=8, out=j)": "Unexpected keyword argument `out`",
    "jax_api.write_indexer_cache(j, ref, j)": "No matching overload",
    "xmla.warmup('v3.2')": "parameter `config` with type `Model`",
    "xmla.model_config('deepseek_v4', tensor_parallel='8')": "parameter `tensor_parallel` with type `int`",
    "xmla.ModelConfig(head=16)": "Unexpected keyword argument `head`",
    "xmla.warm_up": "No attribute `warm_up` in module `xmla`",
    "layouts.convert([1], 'v4')": "`list[int]` is not assignable",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's project, in whose environment xmla is installed from its wheel."""
    require_tool("pyrefly")
    project = tmp_path_factory.mktemp("project")
    installed = project / "site-packages"  # the server looks from there too for what it imports
    with zipfile.ZipFile(make_wheel(tmp_path_factory.mktemp("source"))) as archive:
        archive.extractall(installed)
    others = [find_spec(name) for name in ("jax", "numpy", "torch", "triton")]
    paths = [str(Path(spec.origin).parent.parent) for spec in others if spec and spec.origin]
    (project / "pyrefly.toml").write_text(
        f"site-package-path = {json.dumps([str(installed), *dict.fromkeys(paths)])}\n"
        "skip-interpreter-query = true\n"
        'python-version = "3.12"\n'
    )
    return project


def reports(project: Path, expressions: list[str]) -> list[str]:
    """What pyrefly says of each expression."""
    file = project / "script.py"
    file.write_text(FIRST + "\n".join(expressions))
    command = [*PYREFLY, "check", str(file), "--output-format", "json", "--min-severity", "info"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=SECONDS, check=False)
    before = FIRST.count("\n")
    found = [""] * (before + len(expressions))
    for error in json.loads(done.stdout)["errors"]:
        found[error["line"] - 1] += error["description"] + "\n"
    assert found[:before] == [""] * before, done.stdout
    return found[before:]


def test_types_of_calls(project: Path) -> None:
    said = reports(project, [f"reveal_type({call})" for call in TYPES])
    for (call, expected), answer in zip(TYPES.items(), said, strict=True):
        assert answer == f"revealed type: {expected}\n", call


def test_wrong_calls_are_reported(project: Path) -> None:
    for (call, expected), answer in zip(ERRORS.items(), reports(project, list(ERRORS)), strict=True):
        assert expected in answer, call


@contextmanager
def language_server(project: Path) -> Iterator["Server"]:
    command, pipe = [*PYREFLY, "lsp"], subprocess.PIPE
    with subprocess.Popen(command, cwd=project, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        timer = Timer(SECONDS, process.kill)  # a read then ends
        timer.start()
        try:
            yield Server(process)
        finally:
            timer.cancel()
            process.kill()


class Server:
    """A language server over its standard streams (Language Server Protocol 3.17, base protocol)."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.asked = 0

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return json.loads(self.process.stdout.read(length))

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        self.asked += 1
        self.send(id=self.asked, method=method, params=params)
        while True:
            message = self.receive()
            if message.get("id") == self.asked and "method" not in message:
                return message["result"]
            if "id" in message and "method" in message:  # a question of the server's own
                self.send(id=message["id"], result=None)


def test_an_editor_completes_and_explains(project: Path) -> None:
    lines = ["from xmla import jax_api, torch_api", "torch_api.", "jax_api."]
    lines += ["torch_api.sparse_mla(", "torch_api.sparse_mla.plan("]
    file = project / "edited.py"
    with language_server(project) as server:
        server.ask("initialize", {"processId": os.getpid(), "rootUri": project.as_uri(), "capabilities": {}})
        server.send(method="initialized", params={})
        document = {"uri": file.as_uri(), "languageId": "python", "version": 1, "text": "\n".join(lines)}
        server.send(method="textDocument/didOpen", params={"textDocument": document})

        def at(line: int, column: int) -> dict[str, Any]:
            return {"textDocument": {"uri": file.as_uri()}, "position": {"line": line, "character": column}}

        for line in (1, 2):
            items = server.ask("textDocument/completion", at(line, len(lines[line])))["items"]
            offered = {item["label"] for item in items}
            assert offered >= {*public_ops()}, lines[line]
            assert not {"public", "ops", "_ops", "needed", "no_attribute"} & offered, lines[line]
        op = public_ops()["sparse_mla"]
        for line, column, returns, told in (
            (3, len("torch_api.sp"), "-> tuple[Tensor, Tensor]", "Multi-head latent attention of each token"),
            (4, len("torch_api.sparse_mla.pl"), "-> Plan", "The plan of a call with these arguments"),
        ):
            (shown,) = server.ask("textDocument/signatureHelp", at(line, len(lines[line])))["signatures"]
            named = [parameter["label"].split(":")[0] for parameter in shown["parameters"]]
            assert named == [*op.tensors, *op.defaults, "out", "workspace", "implementation"]
            assert returns in shown["label"]
            hover = server.ask("textDocument/hover", at(line, column))["contents"]["value"]
            assert returns in hover and told in hover, hover
        server.ask("shutdown", {})
        server.send(method="exit")
        assert server.process.wait(SECONDS) == 0
