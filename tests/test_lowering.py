"""JAX lowers and exports for CUDA without a GPU, to the very kernels that torch launches."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import EVERYTHING, require_assembler

from tools import kept
from xmla.core.registry import registry

ROOT = Path(__file__).parent.parent
# Without a GPU two, one of which writes in place, and what has changed since `make matrix`, which takes all three.
ARCHITECTURES = (90, 100, 120) if kept.MATRIX else (90, 100)
ALWAYS = {"select_topk", "write_mla_cache"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_jax_lowers_to_the_kernels_torch_launches(
    arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    require_assembler(arch)
    # A cache of its own: PTX names the files of the Triton that made it, and another one may have filled the cache.
    cache, dumps = tmp_path / "cache", tmp_path / "dumps"
    dumps.mkdir()
    environment = {"JAX_PLATFORMS": "cpu", "JAX_TRITON_DUMP_DIR": str(dumps), "TRITON_CACHE_DIR": str(cache)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    named = sorted(registry() if EVERYTHING else ALWAYS)
    digests, lines = kept.changed(f"lowered-sm_{arch}", ROOT / "tools" / "lower_for_cuda.py", str(arch), *named)
    record_property(kept.OLD, kept.old(f"lowered-sm_{arch}", digests))
    of_hopper = {"sparse_mla triton", "sparse_mla in parts", "indexer_topk in parts"}
    assert digests.keys() == set(registry()) | (of_hopper if arch == 90 else set())
    ops = {line["op"]: line for line in lines}
    assert ops.keys() >= set(named)
    for op in ops.values():
        assert op["custom_calls"] >= op["launches"] > 0 and op["restored"], op
        assert op["jax"] == op["triton"], f"{op['op']}: the two front-ends compile other kernels"
        assert op["more"] == 0, f"{op['op']}: a kernel that is ready for torch is compiled for JAX again"
    kept.keep(f"lowered-sm_{arch}", digests)


def test_other_kernels_are_lowered_as_without_xmla() -> None:
    """With their own options, whatever XMLA_FORBID_JIT says."""
    require_assembler(90)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "programs" / "foreign_kernel.py")]
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "_triton_kernel_call_dce_rule() takes 2 positional arguments but 3 were given" in done.stderr:
        pytest.skip("jax-triton 0.4.1 lowers kernels that are called directly with JAX 0.11 alone")
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout) > 0
