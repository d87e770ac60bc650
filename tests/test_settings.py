"""The XMLA_* variables: each does what its line in docs/serving.md says, in a process of its own."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit
import numpy as np
import pytest
import torch
from conftest import HAS_GPU

from xmla import ArgumentError, CompileError, UnsupportedError, _warmup, jax_api, torch_api
from xmla.core.compile import compiled, compiles, compiling_allowed, specialize
from xmla.core.compile import compiler as compile
from xmla.core.config import settings, variables
from xmla.core.models.calls import Call
from xmla.core.models.v32 import ModelConfig
from xmla.core.op import Op
from xmla.core.registry import registry
from xmla.core.values import H200, Spec
from xmla.jax_api._all_ops import JAX_OPS
from xmla.torch_api._all_ops import TORCH_OPS

ROOT = Path(__file__).parent.parent
SELECT = (
    "import torch; from xmla import torch_api\n"
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
    "logits, ends = torch.zeros(1, 9, device=device), torch.full((1,), 9, dtype=torch.int32, device=device)\n"
    "for _ in range(2): torch_api.select_topk(logits, ends, k=3)\n"
)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_print_plans_once_each() -> None:
    quiet, loud = run_python(SELECT), run_python(SELECT, XMLA_PRINT_PLANS="1")
    assert quiet.returncode == loud.returncode == 0, loud.stderr
    assert "bytes of workspace" not in quiet.stderr
    assert loud.stderr.count("select_topk on ") == 1 and re.search(r"topk_\w+_kernel × 1", loud.stderr)


LOGGED = """
import logging
{before}
import xmla.core.config
{after}
logging.getLogger("xmla").info("a line")
"""
ROOT_LOGGER = "logging.basicConfig(level=logging.INFO, format='root: %(message)s')"
OWN_LOGGER = "logging.getLogger('xmla').addHandler(logging.StreamHandler())"


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ("", "", " xmla INFO a line"), (ROOT_LOGGER, "", "root: a line"), ("", ROOT_LOGGER, "root: a line"),
        ("", OWN_LOGGER, "a line"),
    ],
)  # fmt: skip
def test_a_line_is_logged_once(before: str, after: str, want: str) -> None:
    """Where the program, such as an engine, has set up logging, by its handlers alone."""
    done = run_python(LOGGED.format(before=before, after=after), XMLA_LOG="info")
    assert done.stderr.count("a line") == 1 and done.stderr.endswith(f"{want}\n"), done.stderr


def test_plans_go_where_the_program_logs() -> None:
    done = run_python(f"import logging; {ROOT_LOGGER}\n{SELECT}", XMLA_PRINT_PLANS="1")
    assert done.stderr.count("select_topk on ") == done.stderr.count("root: select_topk on ") == 1, done.stderr
    assert "select_topk on " in run_python(SELECT, XMLA_LOG="DEBUG").stderr
    assert "select_topk on " not in run_python(SELECT, XMLA_LOG="INFO").stderr


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("XMLA_FORBIDJIT", "XMLA_FORBID_JIT"), ("xmla_log", "XMLA_LOG"), ("XMLA_LOG_LEVEL", "XMLA_LOG"),
        ("XMLA_SHADOWS", "XMLA_SHADOW"), ("XMLA_PRINT_PLAN", "XMLA_PRINT_PLANS"),
        ("XMLA_REPRODUCERS_DIR", "XMLA_REPRODUCER_DIR"), ("XMLA_SGLANG_REQUIRE", "XMLA_SGLANG_REQUIRED"),
    ],
)  # fmt: skip
def test_a_misspelt_variable_is_warned_of(name: str, meant: str) -> None:
    done = run_python("import xmla.core.config", **{name: "1"})
    assert done.returncode == 0
    assert done.stderr == f"the environment has {name}, which is not read; did you mean {meant}?\n"


def test_a_variable_of_others_is_not() -> None:
    others = {"XMLA_SERVICE_HOST": "10.0.0.1", "XMLA_PORT": "tcp://", "XMLA_VERSION": "1", "XMLA_ALL": "1"}
    assert run_python("import xmla.core.config", **others, **{name: "" for name, _, _ in variables()}).stderr == ""


COMPILED = """
from dataclasses import replace
import xmla
from xmla.core.compile import compiled, compiling_allowed
from xmla.core.values import H200
from xmla.core.models.v32 import ModelConfig

def first_of(**sizes):
    return ModelConfig(batches=(1,), max_lens=(64,), prefill_tokens=(), **sizes).specializations(H200)[0]

assert xmla.compiles() == ()
wanted = first_of()
compiled(wanted, 90)
compiled(wanted, 90)
compiled(first_of(page_size=32), 90)
compiled(replace(wanted, unaligned=frozenset({"rope_ptr"})), 90, 1)
one, two, three = xmla.compiles()
assert (one.op, one.kernel, one.arch, one.news) == ("write_mla_cache", "write_mla_cache_kernel", 90, {})
assert two.news["PAGE_SIZE"] == (64, 32) and two.seconds > 0, two.news
assert three.news == {"rope_ptr": ("*bf16", "*bf16, unaligned"), "GPU": (0, 1)}, three.news
print(two, three, sep=chr(10))
"""
WARMUP_HINT = "`xmla warmup` or xmla.warmup(…) compiles a model's kernels before"


def test_compiles_are_counted_and_logged(tmp_path: Path) -> None:
    """Each with the nearest kernel that was there; the first call that compiles names the warm-up, once."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    loud, quiet = (run_python(COMPILED, XMLA_LOG=level, **environment) for level in ("info", ""))
    assert loud.returncode == quiet.returncode == 0, loud.stderr + quiet.stderr
    two, three = loud.stdout.splitlines()
    assert (
        "s for sm_90 write_mla_cache: write_mla_cache_kernel, its first kernel: write_mla_cache_kernel(" in loud.stderr
    )
    assert two in loud.stderr and three in loud.stderr and "PAGE_SIZE=64" in loud.stderr
    assert "PAGE_SIZE is 32, was 64" in two and three.endswith(
        "rope_ptr is *bf16, unaligned, was *bf16; GPU is 1, was 0"
    )
    assert loud.stderr.count(WARMUP_HINT) == 1 and loud.stderr.index(WARMUP_HINT) < loud.stderr.index("s for sm_90")
    assert str(tmp_path) in loud.stderr
    assert not quiet.stderr


BY_JAX = """
import jax, jax.numpy as jnp
import xmla
from xmla import jax_api
from xmla.core.values import H200, assume_device

def lower(columns):
    shapes = [jax.ShapeDtypeStruct((1, columns), jnp.int32), jax.ShapeDtypeStruct((1, 9), jnp.int32)]
    function = jax.jit(lambda indices, table: jax_api.map_slots(indices, table, page_size=64))
    with assume_device(H200):
        jax.export.export(function, platforms=["cuda"], disabled_checks=jax_api.EXPORT_CHECKS)(*shapes)

for columns in (*range(1, 9), *range(90, 110)):
    lower(columns)
for made in xmla.compiles():
    print(made)
"""


def test_compiles_of_a_growing_sequence_in_jax(tmp_path: Path) -> None:
    """Widths of indices that grow compile two kernels: of any width, and of whole vectors."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu"}
    done = run_python(BY_JAX, XMLA_LOG="info", **environment)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith("map_slots: map_slots_kernel, its first kernel") and first in done.stderr
    assert second.endswith("map_slots: map_slots_kernel, UNIT is 4, was 1") and second in done.stderr
    assert done.stderr.count(WARMUP_HINT) == 1


def test_warmup_does_not_name_itself(tmp_path: Path) -> None:
    code = "import xmla\nfrom xmla.core.values.device import H200\nfrom xmla.core.models.v32 import ModelConfig\n"
    code += "xmla.warmup(ModelConfig(heads=8, k=64, batches=(1,), max_lens=(64,), prefill_tokens=()), H200)"
    done = run_python(code, XMLA_LOG="info", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert done.returncode == 0 and "s for sm_90" in done.stderr and WARMUP_HINT not in done.stderr, done.stderr


def test_a_level_that_does_not_exist() -> None:
    done = run_python("import xmla.core.config", XMLA_LOG="foo")
    assert done.returncode == 1 and "ArgumentError: XMLA_LOG is 'foo', expected one of CRITICAL, " in done.stderr


def test_forbidden_compiles_name_the_specialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "forbid_jit", True)
    specs = {"logits": Spec((133, 200077), "float32"), "ends": Spec((133,), "int32")}  # for the portable kernels
    plan = Call("select_topk", specs, {"k": 5}).plan(H200)
    wanted = specialize(plan.launches[0], plan, specs)
    # An architecture that no other test compiles for.
    with pytest.raises(UnsupportedError, match=r"no warm-up made ready, for sm_91: topk_candidates_kernel\(.*STEP=16"):
        compiled(wanted, 91)
    with compiling_allowed():
        if HAS_GPU:
            assert compiled(wanted, 90).asm["cubin"]
        else:
            with pytest.raises(CompileError):  # interpreted kernels do not compile
                compiled(wanted, 90)


def legal(op: Op, inputs: dict[str, np.ndarray], attrs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The case's inputs with what lies out of its limits brought to the lower one: absent slots, empty rows."""
    problem = op.bind({n: Spec.of_numpy(a) for n, a in inputs.items()}, op.attributes(**attrs))
    for limit in op.limits(problem, inputs):
        array = inputs[limit.argument]
        array[limit.violated(array)] = limit.low
    return inputs


CHECKED = [
    ("sparse_mla", 0, "slots", (0, 3), 10**6, r"slots\[0, 3\] is 1000000, limit \[-1, "),
    ("indexer_logits_paged", 0, "lengths", (0,), -4, r"lengths\[0\] is -4, limit \[0, "),
    ("indexer_logits_paged", 1, "block_table", (2, 0), -9, r"block_table\[2, 0\] is -9, limit \[0, "),
    ("select_topk", 0, "ends", (0,), 10**7, r"ends\[0\] is 10000000, limit \[0, "),
    ("map_slots", 2, "request_ids", (0,), 99, r"request_ids\[0\] is 99, limit \[-1, "),
    ("write_mla_cache", 0, "slots", (0,), 2**30, r"slots\[0\] is 1073741824, limit \[-1, "),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "case", "argument", "place", "value", "message"), CHECKED)
def test_check_reports_tensor_row_column_value_limit(
    name: str, case: int, argument: str, place: tuple[int, ...], value: int, message: str, device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(settings, "check", True)
    op = registry()[name]
    attrs = op.cases[case].attrs
    inputs = legal(op, kit.make(op.cases[case]), attrs)
    inputs[argument][place] = value
    with pytest.raises(ArgumentError, match=f"{name}: {message}"):
        getattr(TORCH_OPS, name)(*kit.torch_inputs(op, inputs, device), **attrs)
    with pytest.raises(Exception, match=f"{name}: {message}"):
        got = getattr(JAX_OPS, name)(*kit.jax_inputs(op, inputs), **attrs)
        for value in kit.as_tuple(got):
            value.block_until_ready()
        import jax

        jax.effects_barrier()


@pytest.mark.parametrize("name", sorted(registry()))
def test_check_passes_what_engines_pass(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent slots, padding rows and stale table entries past the lengths are no mistakes."""
    monkeypatch.setattr(settings, "check", True)
    op = registry()[name]
    case = op.cases[0]
    inputs = legal(op, kit.make(case), case.attrs)
    getattr(TORCH_OPS, name)(*kit.torch_inputs(op, inputs, device), **case.attrs)


def test_every_variable_is_documented() -> None:
    page = (ROOT / "docs/serving.md").read_text()
    for variable, meaning, _ in variables():
        assert f"| `{variable}` | {meaning} |" in page


WARMED = """
import logging, sys
import xmla
from xmla.core.compile import compiled, compiles
from xmla.core.config import settings
from xmla.core.values import H200

config = xmla.ModelConfig(
    heads=8, index_heads=16, index_dim=32, k=64, next_n=(1, 2, 3), mixed=True, batches=tuple(range(1, 9)),
    max_lens=(64, 1024), prefill_tokens=(),
)
report = xmla.warmup(config, H200, progress=False)
made = len(compiles())
settings.forbid_jit = True
# Another sweep within the configuration: sizes between those listed.
from dataclasses import replace
sweep = replace(config, batches=(1, 3, 5, 7), max_lens=(64, 700))
for specialization in sweep.specializations(H200):
    compiled(specialization, 90)
assert len(compiles()) == made, "a call within the configuration compiled"
try:
    for specialization in replace(config, page_size=128).specializations(H200):
        compiled(specialization, 90)
except xmla.UnsupportedError as error:
    assert "PAGE_SIZE=128" in str(error)
else:
    raise AssertionError("a call outside of the configuration compiled")
print(len(report.specializations))
"""


@pytest.mark.slow
def test_warmup_closes_the_list_and_persists(tmp_path: Path) -> None:
    """Two processes fill one cache on disk at once; a third only loads it."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WARMED]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs[0][1] + outputs[1][1]
    cubins = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/*/*.cubin")}
    third = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert 10 <= int(third.stdout) <= len(cubins)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.glob("cache/*/*.cubin")}
    assert after == cubins, "the third process compiled again"


@pytest.mark.parametrize("gpus", [1, 3, 8])
def test_processes_of_an_engine_begin_with_kernels_of_their_own(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes all of them ready, its share first: no two processes compile the same at the same time."""
    kernels = [f"kernel {number}" for number in range(10)]
    listed = SimpleNamespace(listed=dict.fromkeys(kernels), planned=["a call"])
    monkeypatch.setattr(_warmup, "kernel_list", lambda *_: listed)
    monkeypatch.setattr(_warmup, "make_ready", lambda asked, calls, *_, **__: asked if calls == ["a call"] else None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    asked = [_warmup.make_engine_ready([], H200, ordinal) for ordinal in range(gpus)]
    assert all(sorted(each) == kernels for each in asked)
    for turn in range(len(kernels) // gpus):
        assert len({each[turn] for each in asked}) == gpus


def test_warmup_loads_kernels_onto_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each before the first call; for a device that is not there none, and no call is served."""
    loaded: list[tuple[str, int]] = []
    served: list[tuple[int, int]] = []
    planned: list[tuple[list[Any], int]] = []

    class Kernel(SimpleNamespace):
        @property
        def run(self) -> None:
            loaded.append((self.name, self.ordinal))

    kernels: Any = [SimpleNamespace(kernel=SimpleNamespace(__name__=name)) for name in ("one", "two", "three")]
    monkeypatch.setattr(
        _warmup, "compiled", lambda kernel, arch, ordinal: Kernel(name=kernel.kernel.__name__, ordinal=ordinal)
    )
    monkeypatch.setattr(_warmup, "serving_begins", lambda arch, ordinal: served.append((arch, ordinal)))
    monkeypatch.setattr(_warmup, "plan_calls", lambda calls, ordinal: planned.append((calls, ordinal)))
    calls: Any = ["a call"]
    _warmup.make_ready(kernels, calls, H200, None, workers=2, progress=False)
    assert loaded == served == planned == []
    _warmup.make_ready(kernels, calls, H200, 3, workers=2, progress=False)
    assert loaded == [("one", 3), ("two", 3), ("three", 3)] and served == [(90, 3)] and planned == [(calls, 3)]


def test_a_kernel_that_a_call_compiles_after_warmup_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same GPU: a server waited for it. Before warm-up, and of warm-up itself, it is none."""
    for name, value in (("_compile", lambda *_: None), ("_compiles", []), ("_warmed", set())):
        monkeypatch.setattr(compile, name, value)
    monkeypatch.setattr(compile, "_facts", defaultdict(list))
    specs = {"indices": Spec((3, 77), "int32"), "block_table": Spec((3, 9), "int32")}
    (wanted,) = Call("map_slots", specs, {"page_size": 77}).specializations(H200)
    with caplog.at_level("INFO", "xmla"):
        compiled(wanted, 92, 1)
        compile.serving_begins(92, 1)
        compiled(wanted, 92, 2)
        with compiling_allowed():
            compiled(replace(wanted, num_warps=1), 92, 1)
        assert not [record for record in caplog.records if record.levelname != "INFO"]
        caplog.clear()
        compiled(replace(wanted, num_warps=2), 92, 1)
    (record,) = caplog.records
    told = "a call waited for a kernel that warm-up does not list: .* for sm_92 .*: map_slots_kernel, num_warps is 2"
    assert record.levelname == "WARNING" and re.match(told, record.getMessage())
    assert [made.news for made in compiles()] == [
        {}, {"GPU": (1, 2)}, {"num_warps": (4, 1)}, {"num_warps": (1, 2)}
    ]  # fmt: skip


def test_warmup_needs_compiled_kernels() -> None:
    from xmla import warmup
    from xmla.machine.environment import HAS_GPU

    if not HAS_GPU:
        with pytest.raises(UnsupportedError, match="no GPU is present; pass the device"):
            warmup(ModelConfig())
        with pytest.raises(UnsupportedError, match="interpreted in this process; unset TRITON_INTERPRET"):
            warmup(ModelConfig(batches=(1,), max_lens=(64,), prefill_tokens=()), H200)
    else:
        report = warmup(ModelConfig(batches=(1,), max_lens=(64,), prefill_tokens=()), progress=False)
        assert report.specializations


@pytest.mark.gpu
def test_nothing_compiles_after_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls themselves, in both front-ends, over a sweep of shapes, with compiling forbidden."""
    import jax
    import jax.numpy as jnp

    from xmla import warmup

    config = ModelConfig(
        heads=16, index_heads=64, k=64, softmax_scale=0.1, next_n=(1, 2), batches=(1, 2, 4), max_lens=(256, 512),
        prefill_tokens=(),
    )  # fmt: skip
    warmup(config, progress=False)
    monkeypatch.setattr(settings, "forbid_jit", True)
    torch_api._prepared.call_cache.clear()
    before = len(compiles())
    for requests in (1, 2, 3, 4):
        for next_n in (1, 2):
            for max_len in (256, 512):
                tokens = requests * next_n
                q = torch.randn(tokens, 16, 576, device="cuda").bfloat16()
                index_q = torch.randn(tokens, 64, 128, device="cuda").bfloat16()
                weights = torch.randn(tokens, 64, device="cuda")
                pools = [torch.zeros(1024, 64, row, dtype=torch.uint8, device="cuda") for row in (656, 132)]
                table = torch.zeros(requests, max_len // 64, dtype=torch.int32, device="cuda")
                lengths = torch.full((tokens,), 100, dtype=torch.int32, device="cuda")
                arguments = (q, index_q, weights, *pools, table, lengths)
                ours = torch_api.dsa_attention(*arguments, k=64, softmax_scale=0.1)
                step = jax.jit(lambda *a: jax_api.dsa_attention(*a, k=64, softmax_scale=0.1))
                theirs = step(*[jnp.asarray(kit.as_numpy(a)) for a in arguments])
                kit.assert_bits_equal("out", ours[0], theirs[0])
    assert len(compiles()) == before
    others = [
        torch.zeros(16, 93, row, dtype=torch.uint8, device="cuda") for row in (656, 132)
    ]  # a page of no other test
    with pytest.raises(UnsupportedError, match="XMLA_FORBID_JIT is set"):
        torch_api.dsa_attention(*arguments[:3], *others, *arguments[5:], k=64, softmax_scale=0.1)
