"""vLLM's engine on xmla's ops, in Triton's interpreter: `make vllm` installs the tested releases and runs this.

Each engine is a process of its own, since a plugin changes vLLM for good.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from benchmarks.engines import entry_points
from benchmarks.engines.vllm.adapter import CALLED

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
ARCHITECTURES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]


def release() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


pytestmark = [pytest.mark.slow, pytest.mark.skipif(release() is None, reason="needs vLLM: make vllm")]


OLD = release() is not None and Version(str(release())) < Version("0.33")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run(plugins, *words)`: python in an environment that has xmla's entry points and the tests' platform."""
    folder = tmp_path_factory.mktemp("vllm")
    entry_points.write(folder, **{"vllm.platform_plugins": {"interpreted": "interpreted:platform"}})
    path = [str(ROOT), str(FOLDER), str(folder), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip

    def start(plugins: str, *words: str) -> subprocess.CompletedProcess[str]:
        given = environment | {"VLLM_PLUGINS": plugins}
        return subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True, check=False)

    return start


@pytest.fixture(scope="module")
def models(run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = "v32", "v4", "v41", "glm", "hy", "v4-dspark", "v41-dspark"
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    for name, folder in folders.items():
        made = run("", "-m", "benchmarks.engines.models", str(folder), name)
        assert made.returncode == 0, made.stderr[-3000:]
    return folders


@pytest.fixture(scope="module")
def serve(
    run: Callable[..., Any], models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    def served(*options: str, model: Path = models["v32"]) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("served") / "out.json"
        done = run("xmla,interpreted", str(FOLDER / "serve.py"), str(model), str(out), *options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        log = done.stdout + done.stderr  # 0.26 logs on stdout, 0.33 on stderr
        assert log.count("DeepSeek sparse attention runs on xmla: ") == 1, log
        answered = json.loads(out.read_text())
        assert not answered["unlisted"], answered["unlisted"]  # on no GPU would a step wait for a kernel
        return answered | {"log": log, "folder": out.parent / "selections"}

    return served


@pytest.fixture(scope="module")
def kernels(serve: Callable[..., Any]) -> dict[str, Any]:
    return serve()


@pytest.fixture(scope="module")
def v4_kernels(serve: Callable[..., Any], models: dict[str, Path]) -> dict[str, Any]:
    return serve(model=models["v4"])


@pytest.fixture(scope="module")
def v41_kernels(serve: Callable[..., Any], models: dict[str, Path]) -> dict[str, Any]:
    if OLD:
        pytest.skip("new in 0.33")
    return serve(model=models["v41"])


@pytest.fixture(scope="module")
def hy_kernels(serve: Callable[..., Any], models: dict[str, Path]) -> dict[str, Any]:
    if OLD:
        pytest.skip("new in 0.33")
    return serve(model=models["hy"])


@pytest.fixture(scope="module")
def glm_kernels(serve: Callable[..., Any], models: dict[str, Path]) -> dict[str, Any]:
    if OLD:
        pytest.skip("new in 0.33")
    return serve("--cache", "auto", model=models["glm"])


@pytest.fixture(scope="module")
def undrafted(serve: Callable[..., Any], models: dict[str, Path]) -> Callable[[str], Any]:
    """What a model with DSpark answers without it."""
    return cache(lambda name: serve(model=models[f"{name}-dspark"]))


def test_every_op_ran(kernels: dict[str, Any]) -> None:
    calls = kernels["calls"]
    assert kernels["attention"] == ["XmlaSparseImpl"]
    assert kernels["cached"] == 64  # a page
    assert len(calls) == 8 and min(calls.values()) >= 4, calls
    # Both layers gather keys, from slots that the first one finds.
    assert calls["read_indexer_cache"] == 2 * calls["split_batch"] >= 8
    assert "xmla is tested with" not in kernels["log"]


def test_tokens_are_those_of_the_references(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    reference = serve("--reference")
    assert reference["calls"] == kernels["calls"]
    assert reference["tokens"] == kernels["tokens"]


def test_tokens_over_plain_rows(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """The attention's entries are not quantised; the indexer's keys are the same."""
    assert serve("--cache", "auto", "--reference")["tokens"] == kernels["tokens"]


def test_tokens_of_gathered_prefills(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """As on Hopper, where a step with decodes then has two calls of attention."""
    gathered = serve("--gather")
    assert gathered["tokens"] == kernels["tokens"]
    assert gathered["calls"]["read_mla_cache"] > 0
    assert gathered["calls"]["sparse_mla"] > kernels["calls"]["sparse_mla"]


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_tokens_with_a_plain_layer_beside_a_packed_one(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """kv_cache_dtype_skip_layers: its prefills attend to the cache, where those of the other layer are gathered."""
    served = serve("--plain", "0", "--gather")
    assert served["tokens"] == kernels["tokens"] and served["entries"] == [132, 576, 656]
    assert 0 < served["calls"]["read_mla_cache"] < served["calls"]["read_indexer_cache"]


@pytest.mark.parametrize("drafts", ["1", "7"])
def test_tokens_with_drafts(drafts: str, kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """The tokens of a request together; but seven drafts one by one before 0.33.

    Drafts after the first take over the metadata of the step before.
    """
    drafted = serve("--drafts", drafts, "--reference")
    assert drafted["tokens"] == kernels["tokens"]
    if not OLD:
        assert "use_flattening=False" in drafted["log"]
        assert "cannot update draft decode metadata" not in drafted["log"]
    assert drafted["calls"]["sparse_mla"] != kernels["calls"]["sparse_mla"]


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1, "max_num_batched_tokens": 17, "block_size": 128,
         "attention_config": {"sparse_mla_force_mqa": True}},
        {"enforce_eager": False, "enable_lora": True, "max_lora_rank": 8, "kv_cache_dtype_skip_layers": ["0", "1"]},
    ],
)  # fmt: skip
def test_tokens_with_other_options(options: dict[str, Any], kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """Chunks of 17 tokens of one request at a time, in larger blocks; LoRA without eager mode, over plain entries."""
    assert serve("--options", json.dumps(options))["tokens"] == kernels["tokens"]


def save_adapter(folder: Path, model: Path, parts: set[str]) -> dict[str, torch.Tensor]:
    """Write an adapter of rank 4 of these projections in all layers; their weights with what it adds."""
    found, adapted, generator = {}, {}, torch.Generator().manual_seed(3)
    for name, weight in load_file(model / "model.safetensors").items():
        at = name.removesuffix(".weight")
        if at.rpartition(".")[2] in parts:
            rows, columns = weight.shape
            down, up = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((4, columns), (rows, 4)))
            down, up = down * columns**-0.5, up * weight.std() * columns**0.5
            found |= {f"base_model.model.{at}.lora_A.weight": down, f"base_model.model.{at}.lora_B.weight": up}
            adapted[name] = weight + up @ down
    folder.mkdir(exist_ok=True)
    save_file(found, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": sorted(parts), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return adapted


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_an_adapter_changes_queries_entries_and_selections(
    serve: Callable[..., Any], models: dict[str, Path], tmp_path: Path
) -> None:
    """Beside transformers' model with the adapter in its weights, as `test_probabilities_are_those_of_the_model`."""
    from transformers import DeepseekV32ForCausalLM

    parts = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "wq_b"}  # the last is the indexer's
    adapted = save_adapter(tmp_path, models["v32"], parts)
    served = serve("--adapter", str(tmp_path))
    original = DeepseekV32ForCausalLM.from_pretrained(models["v32"], dtype=torch.float32)
    assert max(distances(served, original).values()) > 0.3
    original.load_state_dict({name: weight.float() for name, weight in adapted.items()}, strict=False)
    assert all(distance < 0.2 for distance in distances(served, original).values())


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_an_adapter_that_vllm_leaves_out_is_refused(
    run: Callable[..., Any], models: dict[str, Path], tmp_path: Path
) -> None:
    save_adapter(tmp_path, models["v32"], {"o_proj", "kv_b_proj"})
    words = str(models["v32"]), str(tmp_path / "out"), "--adapter", str(tmp_path)
    done = run("xmla,interpreted", str(FOLDER / "serve.py"), *words)
    assert done.returncode != 0
    assert "xmla.vllm: not served: an adapter (LoRA) of kv_b_proj" in done.stdout + done.stderr


@pytest.mark.skipif(OLD, reason="new in 0.33")
def test_drafts_with_the_selection_of_the_first(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """index_share_for_mtp_iteration: drafts after the first select nothing."""
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    apart, shared = (
        serve("--options", json.dumps({"speculative_config": drafts | {"index_share_for_mtp_iteration": shares}}))
        for shares in (False, True)
    )
    assert shared["tokens"] == kernels["tokens"]
    assert shared["calls"]["sparse_mla"] == apart["calls"]["sparse_mla"]
    assert shared["calls"]["indexer_topk_paged"] < apart["calls"]["indexer_topk_paged"]


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_what_engines_on_a_gpu_are_asked(run: Callable[..., Any], models: dict[str, Path], tmp_path: Path) -> None:
    """Rounds, a trace and answers of `benchmarks.engines`, by vLLM's own steps and workers."""
    done = run("xmla,interpreted", str(FOLDER / "measured.py"), str(models["v32"]), str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["round"]["same_tokens"] == 1 and found["round"]["cached_tokens"] == 2 * 64
    assert all(found["round"][name] > 0 for name in ("step_us", "forward_us", "prefill_tokens_per_s"))
    assert len(found["trace"]["ttft_ms"]) == 3 and all(step[-1] for step in found["trace"]["steps"])  # with a pass each
    answered = found["answer"]
    assert [len(each["tokens"]) for each in answered["answers"].values()] == [4, 4]
    assert [len(each["logprobs"]) for each in answered["answers"].values()] == [69, 8]
    assert answered["attention"] == ["XmlaSparseImpl"] and answered["calls"].keys() >= CALLED


@pytest.mark.skipif(OLD, reason="with xmla since 0.33")
def test_tokens_over_fp4_entries(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """Entries of 352 bytes beside keys of 132, also where prefills gather rows.

    Log-probabilities are 0.05 to 0.10 from those over entries in fp8.
    """
    cache = "--cache", "nvfp4_ds_mla"
    gathered, reference = serve(*cache, "--gather"), serve(*cache, "--reference")
    assert gathered["tokens"] == reference["tokens"]
    assert gathered["calls"]["read_mla_cache"] > 0
    assert (kernels["entries"], gathered["entries"]) == ([132, 656], [132, 352])
    assert gathered["blocks"] == pytest.approx(kernels["blocks"] * (132 + 656) / (132 + 352), rel=0.01)
    for name, logprobs in kernels["logprobs"].items():
        apart = [abs(a - b) for a, b in zip(reference["logprobs"][name], logprobs, strict=True)]
        assert 0 < sum(apart) / len(apart) < 0.2, (name, apart)


@pytest.mark.skipif(OLD, reason="new in 0.33")
def test_v41_tokens_over_fp4_entries(
    v41_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """A window of 528 bytes beside compressed entries of 288, by vLLM's writers without their instruction."""
    served = serve("--cache", "nvfp4_ds_mla", model=models["v41"])
    gathered = serve("--cache", "nvfp4_ds_mla", "--gather", "--reference", model=models["v41"])
    assert served["entries"] != v41_kernels["entries"] and {288, 528} < {*served["entries"]}
    assert served["tokens"] == gathered["tokens"]


@pytest.mark.skipif(OLD, reason="with xmla since 0.33")
def test_tokens_over_keys_in_mxfp4(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """Keys of 68 bytes beside entries of 352, in pages and gathered; the pool has 1.88 times the tokens."""
    served, reference = (
        serve("--keys", "mxfp4", "--cache", "nvfp4_ds_mla", option) for option in ("--gather", "--reference")
    )
    assert served["tokens"] == reference["tokens"]
    assert served["calls"].keys() == kernels["calls"].keys() | {"read_mla_cache", "copies to the device"}
    assert (kernels["entries"], served["entries"]) == ([132, 656], [68, 352])
    assert served["blocks"] == pytest.approx(kernels["blocks"] * (132 + 656) / (68 + 352), rel=0.01)


@pytest.mark.skipif(OLD, reason="with xmla since 0.33")
@pytest.mark.parametrize("options", [("--drafts", "1"), ("--ranks", "2"), ("--ampere",)], ids=" ".join)
def test_tokens_over_keys_in_mxfp4_with_other_options(options: tuple[str, ...], serve: Callable[..., Any]) -> None:
    plain, served = serve("--keys", "mxfp4"), serve("--keys", "mxfp4", *options)
    assert plain["entries"] == [68, 656]
    assert served["tokens"] == plain["tokens"]


@pytest.mark.skipif(OLD, reason="with xmla since 0.33")
@pytest.mark.parametrize("name", ["v4", "v41", "hy"])
def test_tokens_of_other_models_over_keys_in_mxfp4(
    name: str, serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """V4's and V4.1's are written by vLLM's kernels, without the instruction that rounds to e2m1."""
    served, reference = (serve("--keys", "mxfp4", *more, model=models[name]) for more in ((), ("--reference",)))
    assert 68 in served["entries"] and 132 not in served["entries"]
    assert served["tokens"] == reference["tokens"]


def test_glm_every_op_ran(glm_kernels: dict[str, Any]) -> None:
    """Two layers that select pools, behind one of linear attention whose states share their pages."""
    calls = glm_kernels["calls"]
    assert glm_kernels["attention"] == ["XmlaSparseImpl"] and glm_kernels["cached"] == 128  # a page
    assert len(calls) == 8 and min(calls.values()) >= 4, calls
    assert calls["expand_blocks"] == calls["sparse_mla"]


def test_glm_tokens_are_those_of_the_references(
    glm_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    reference = serve("--cache", "auto", "--reference", model=models["glm"])
    assert reference["calls"] == glm_kernels["calls"]
    assert reference["tokens"] == glm_kernels["tokens"]


def test_glm_log_probabilities_of_another_implementation(glm_kernels: dict[str, Any], models: dict[str, Path]) -> None:
    """transformers' own model, as for V3.2: 0.005 to 0.03 were found. Its linear attention is another, too."""
    from benchmarks.engines.models import GlmInTransformers

    found = distances(glm_kernels, GlmInTransformers(models["glm"]))
    assert all(distance < 0.08 for distance in found.values()), found


def test_glm_tokens_over_packed_entries(
    glm_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """Those of V3.2, with zeros for the roped dims that the model has not; also where prefills gather rows."""
    assert serve(model=models["glm"])["tokens"] == glm_kernels["tokens"]
    gathered = serve("--gather", model=models["glm"])
    assert gathered["tokens"] == glm_kernels["tokens"]
    assert gathered["calls"]["read_mla_cache"] > 0


@pytest.mark.parametrize("name", ["glm", "hy"])
def test_log_probabilities_over_fp4_entries(name: str, serve: Callable[..., Any], models: dict[str, Path]) -> None:
    """Of a model without roped dims, whose entries have zeros, and of one with sinks: 0.008 to 0.031 were found."""
    from benchmarks.engines.models import GlmInTransformers, hy_in_transformers

    if OLD:
        pytest.skip("with xmla since 0.33")
    served = serve("--cache", "nvfp4_ds_mla", model=models[name])
    assert 352 in served["entries"] and "sink bias is disabled" not in served["log"]
    original = {"glm": GlmInTransformers, "hy": hy_in_transformers}[name](models[name])
    found = distances(served, original)
    assert all(distance < 0.08 for distance in found.values()), found


def test_hy_every_op_ran(hy_kernels: dict[str, Any]) -> None:
    """Three layers with sinks, of which the last has the selection of the one before it."""
    calls = hy_kernels["calls"]
    assert hy_kernels["attention"] == ["XmlaSparseImpl"] and hy_kernels["cached"] == 64  # a page
    assert len(calls) == 8 and min(calls.values()) >= 4, calls
    assert calls["sparse_mla"] * 2 == calls["write_indexer_cache"] * 3
    assert "sink bias is disabled" not in hy_kernels["log"]


def test_hy_tokens_are_those_of_the_references(
    hy_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    reference = serve("--cache", "auto", "--reference", model=models["hy"])
    assert reference["calls"] == hy_kernels["calls"]
    assert reference["tokens"] == hy_kernels["tokens"]


def test_hy_log_probabilities_of_another_implementation(hy_kernels: dict[str, Any], models: dict[str, Path]) -> None:
    """transformers' own model, as for V3.2: 0.007 to 0.011 were found; without its sinks 0.008 to 0.066."""
    from benchmarks.engines.models import hy_in_transformers

    original = hy_in_transformers(models["hy"])
    found = distances(hy_kernels, original)
    assert all(distance < 0.02 for distance in found.values()), found
    for layer in original.model.layers:
        layer.self_attn.sinks.data.fill_(-torch.inf)
    assert max(distances(hy_kernels, original).values()) > 0.05


@pytest.mark.skipif(OLD, reason="each layer maps its selection before 0.33")
@pytest.mark.parametrize(("name", "options"), [("v32", ("--shared",)), ("v32", ("--shared", "--gather")), ("hy", ())])
def test_slots_of_a_selection_that_layers_share(
    name: str, options: tuple[str, ...], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """In steps of decodes the first of these layers maps it for all; the same bits as if each does."""
    together, apart = (serve(*options, *more, model=models[name]) for more in ((), ("--apart",)))
    assert together["tokens"] == apart["tokens"] and together["logprobs"] == apart["logprobs"]
    fewer = apart["calls"]["map_slots"] - together["calls"]["map_slots"]
    assert fewer > 5, fewer
    assert all(together["calls"][op] == apart["calls"][op] for op in together["calls"].keys() - {"map_slots"})


@pytest.mark.skipif(OLD, reason="new in 0.33")
def test_ranks_that_share_keys_of_a_model_with_sinks(
    run: Callable[..., Any], models: dict[str, Path], tmp_path: Path
) -> None:
    """Each rank would add the sink to its own keys."""
    done = run("xmla,interpreted", str(FOLDER / "serve.py"), str(models["hy"]), str(tmp_path / "out"), "--ranks", "2")
    assert done.returncode != 0
    told = "xmla.vllm: not served: decode context parallelism of a model with sinks; without xmla in VLLM_PLUGINS"
    assert told in done.stdout + done.stderr


@pytest.mark.skipif(OLD, reason="new in 0.33")
@pytest.mark.parametrize("name", ["v32", "hy"])
def test_tokens_on_a_gpu_without_e4m3(
    name: str, request: pytest.FixtureRequest, serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """As on an A100: xmla quantises the indexer's queries in the place of vLLM's kernels."""
    served = serve("--ampere", model=models[name])
    usual = request.getfixturevalue("kernels" if name == "v32" else "hy_kernels")
    assert served["tokens"] == usual["tokens"]
    assert "quantize_indexer_query" in served["calls"] and "quantize_indexer_query" not in usual["calls"]


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_tokens_of_requests_that_are_preempted(serve: Callable[..., Any]) -> None:
    """Four pages for requests that grow to five: one loses its pages, and its tokens are computed again as a prefill.

    Each step has a dummy batch before it, as where ranks of data parallelism wait for others.
    """
    whole, crowded = (serve("--new", "30", *options) for options in ((), ("--blocks", "5")))
    assert len(crowded["preempted"]) == 1 and not whole["preempted"]
    assert crowded["tokens"] == whole["tokens"]


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
def test_tokens_of_ranks_that_share_layers(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """Pipeline parallelism in two processes, a layer each: the same bits."""
    served = serve("--stages", "2")
    assert served["tokens"] == kernels["tokens"]
    assert served["logprobs"] == kernels["logprobs"]


@pytest.mark.skipif(OLD, reason="newer than 0.26")
def test_the_same_bits_in_any_batch(kernels: dict[str, Any], serve: Callable[..., Any]) -> None:
    """VLLM_BATCH_INVARIANT=1: beside others, after a cached prefix and with a drafted token as alone."""
    alone = serve("--invariant", "--alone")
    assert kernels["invariant"] == [False] and alone["invariant"] == [True] and alone["cached"] == 0
    assert alone["tokens"] == kernels["tokens"]
    for options in ((), ("--drafts", "1")):
        beside = serve("--invariant", *options)
        assert beside["invariant"] == [True] and beside["cached"] == 64
        assert beside["logprobs"] == alone["logprobs"]


@pytest.mark.skipif(OLD, reason="newer than 0.26")
@pytest.mark.parametrize("name", ["v4", "hy"])
def test_the_same_bits_of_other_models_in_any_batch(
    name: str, serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """As of V3.2: over a window and both kinds of compressed entries, and of heads with sinks."""
    alone = serve("--invariant", "--alone", model=models[name])
    assert alone["invariant"] == [True] and alone["cached"] == 0
    for options in ((), ("--drafts", "1")) if name == "v4" else ((),):
        beside = serve("--invariant", *options, model=models[name])
        assert beside["invariant"] == [True] and beside["cached"] > 0
        assert beside["logprobs"] == alone["logprobs"] and beside["tokens"] == alone["tokens"]


def recorded(served: dict[str, Any]) -> dict[tuple[str, int], np.ndarray]:
    """What layers selected in requests, by the request's name and the layer's number."""
    return {(file.parent.name, int(file.stem)): np.load(file) for file in sorted(served["folder"].glob("*/*.npy"))}


@pytest.mark.skipif(OLD, reason="recorded since 0.33")
@pytest.mark.parametrize("options", [(), ("--drafts", "1"), ("--new", "30", "--blocks", "5")])
def test_recorded_selections_are_those_of_a_request_alone(options: tuple[str, ...], serve: Callable[..., Any]) -> None:
    """Beside others, after a cached prefix, where drafts are verified, and of a request that lost its pages."""
    record = "--record", "--invariant"
    alone, beside = serve(*record, "--alone", *options[: 2 * ("--new" in options)]), serve(*record, *options)
    assert alone["logprobs"] == beside["logprobs"] and bool(beside["preempted"]) == ("--blocks" in options)
    want, got = recorded(alone), recorded(beside)
    assert {layer for _, layer in want} == {0, 1} and want.keys() == got.keys() and len(want) == 8
    assert all(np.array_equal(got[each], rows) for each, rows in want.items())
    assert "GiB are left for requests that have ended" in beside["log"]


@pytest.mark.skipif(OLD, reason="recorded since 0.33")
def test_a_trainer_attends_to_recorded_selections(
    serve: Callable[..., Any], models: dict[str, Path], device: str
) -> None:
    """transformers' model in bfloat16, by the same attention over the same rows in one pass.

    Its own indexers select other keys where a rounding changes an order: log-probabilities are then 0.16 and 0.03 from
    the engine's, and 0.010 and 0.015 at the engine's keys. What is left are norms, rotations and residuals, which
    vLLM's model rounds at other places. Where both share them nothing is left (tests/test_transformers_replay.py).
    """
    from transformers import AutoModelForCausalLM

    from xmla.transformers import Selections

    served = serve("--record", "--invariant", "--cache", "auto")
    rows = recorded(served)
    model = AutoModelForCausalLM.from_pretrained(models["v32"], dtype=torch.bfloat16, attn_implementation="xmla")
    model.to(device)
    used: dict[int, torch.Tensor] = {}
    for layer in model.model.layers:
        note = lambda indexer, _, result: used.update({indexer.layer_idx: result})
        layer.self_attn.indexer.register_forward_hook(note)
    given: dict[str, Selections] = {}
    for (name, _), each in rows.items():
        last = np.full_like(each[:1], -1)  # no step had the last token
        layers = {n: torch.from_numpy(np.concatenate((rows[name, n], last)))[None] for n in (0, 1)}
        given[name] = Selections(model.config, layers, batch_invariant=True)

    class Trainer:
        config = model.config

        def __init__(self, replays: bool) -> None:
            self.replays = replays

        def __call__(self, tokens: torch.Tensor) -> Any:
            recorded = next(each for each in given.values() if each.layers[0].shape[1] == tokens.shape[1])
            result = model(tokens.to(device), use_cache=False, selections=recorded if self.replays else None)
            assert not self.replays or all(torch.equal(used[n].cpu(), each) for n, each in recorded.layers.items())
            return SimpleNamespace(logits=result.logits.float().cpu())

    own, found = (distances(served, Trainer(replays)) for replays in (False, True))
    assert all(distance < 0.03 for distance in found.values()), found
    assert found["long"] < own["long"] / 5, (found, own)


@pytest.mark.skipif(OLD, reason="newer than 0.26")
def test_the_same_bits_of_requests_that_are_preempted(serve: Callable[..., Any]) -> None:
    """What is computed again has the bits of decodes.

    Without the mode log-probabilities are others from the 21st token on, where the request loses its pages, and the
    39th is the second of two that are 0.03 apart.
    """
    whole, crowded = (serve("--invariant", "--new", "30", *options) for options in ((), ("--blocks", "5")))
    assert len(crowded["preempted"]) == 1 and not whole["preempted"]
    assert crowded["tokens"] == whole["tokens"]
    assert crowded["logprobs"] == whole["logprobs"]


@pytest.mark.skipif(OLD, reason="its workspace is not of the memory that sleep discards")
@pytest.mark.parametrize(("name", "level"), [("v32", 1), ("v32", 2), ("v4", 2), ("v41", 2)])
def test_the_same_bits_after_sleep(name: str, level: int, serve: Callable[..., Any], models: dict[str, Path]) -> None:
    """All memory that vLLM discards has NaN and far indices: nothing of it is read before it is written again."""
    slept = serve("--sleep", str(level), model=models[name])
    weights = {"weights"} if level == 2 else set()
    assert min(slept["discarded"].values()) > 0 and {*slept["discarded"]} == {"workspace", "kv_cache"} | weights
    again = slept["again"]
    assert again == {key: slept[key] for key in again} and again["cached"] > 0


@pytest.mark.skipif(OLD, reason="not tried with 0.26")
@pytest.mark.parametrize(("name", "options"), [("v32", ("--invariant",)), ("v4", ()), ("v41", ())])
def test_tokens_of_pages_that_a_connector_brings_back(
    name: str, options: tuple[str, ...], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """vLLM's offloading connector copies each whole page; then caches and what they hold are forgotten.

    Prompts find theirs again, also that of the first request, which had none. So its chunks are others, but with the
    same bits in any batch.
    """
    served = serve("--offload", *options, model=models[name])
    again = served["again"]
    assert served["moved"] > 0 and again["cached"] > served["cached"] > 0
    assert again["tokens"] == served["tokens"]
    if options:
        assert again["logprobs"] == served["logprobs"]


@pytest.mark.parametrize("options", [(), ("--drafts", "1", *(() if OLD else ("--interleave", "16", "--late")))])
def test_tokens_of_ranks_that_share_keys(
    options: tuple[str, ...], kernels: dict[str, Any], serve: Callable[..., Any]
) -> None:
    """Decode context parallelism in two processes: keys are taken in turns, one by one or, which 0.26 refuses, 16.

    Log-probabilities are 0.02 apart by the order of sums; with keys of the other rank's positions 0.1 to 0.5.
    """
    served = serve("--ranks", "2", *options)
    assert served["tokens"] == kernels["tokens"]
    for name, others in kernels["logprobs"].items():
        apart = [abs(a - b) for a, b in zip(served["logprobs"][name], others, strict=True)]
        assert sum(apart) / len(apart) < 0.06, (name, apart)


def test_probabilities_are_those_of_the_model(kernels: dict[str, Any], models: dict[str, Path]) -> None:
    """transformers' own model, float32, without pages, plugin or quantisation.

    Near ties of the indexer that are decided otherwise change log-probabilities by 0.1 on average, half of the prompt
    missing by 0.2 to 2.1.
    """
    from transformers import DeepseekV32ForCausalLM

    original = DeepseekV32ForCausalLM.from_pretrained(models["v32"], dtype=torch.float32)
    assert all(distance < 0.2 for distance in distances(kernels, original).values())


def test_v4_through_both_caches(v4_kernels: dict[str, Any]) -> None:
    """A layer of each kind, entries of 128 tokens, a prefix in the caches of all groups; vLLM writes them."""
    calls = v4_kernels["calls"]
    assert v4_kernels["attention"] == ["XmlaV4Attention"]
    assert v4_kernels["cached"] == 256  # a page
    assert len(calls) == 6 and min(calls.values()) >= 5, calls


def test_v4_tokens_are_those_of_the_references(
    v4_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    reference = serve("--reference", model=models["v4"])
    assert reference["calls"] == v4_kernels["calls"]
    assert reference["tokens"] == v4_kernels["tokens"]


def test_v4_tokens_of_gathered_prefills(
    v4_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """As on Hopper: windows and compressed entries of a step's prefills as rows, one copy for all layers' tokens."""
    gathered = serve("--gather", model=models["v4"])
    assert gathered["tokens"] == v4_kernels["tokens"]
    assert gathered["calls"]["read_mla_cache"] > 0
    assert gathered["calls"]["sparse_mla"] == v4_kernels["calls"]["sparse_mla"]


def test_v4_tokens_with_drafts(v4_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]) -> None:
    """Of a layer over the window alone; rejected ones leave entries that are written again."""
    drafted = serve("--drafts", "1", "--reference", model=models["v4"])
    assert drafted["tokens"] == v4_kernels["tokens"]
    assert drafted["calls"]["sparse_mla"] > v4_kernels["calls"]["sparse_mla"]


@pytest.mark.skipif(OLD, reason="not served before 0.33")
@pytest.mark.parametrize("name", ["v4", "v41"])
@pytest.mark.parametrize("options", [(), ("--adaptive",)])
def test_tokens_that_dspark_drafts(
    name: str, options: tuple[str, ...], undrafted: Callable[[str], Any], serve: Callable[..., Any],
    models: dict[str, Path],
) -> None:  # fmt: skip
    """Three tokens in one pass, each of which attends to all of them; some are accepted.

    Adaptive verification takes other numbers of tokens of requests than the host is told.
    """
    plain, drafted = undrafted(name), serve("--dspark", "3", *options, model=models[f"{name}-dspark"])
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["steps"] < plain["steps"]
    assert ("use_flattening=True" in drafted["log"]) == bool(options)
    assert any(host != device for host, device in drafted["trimmed"]) == bool(options)


def test_v4_probabilities_are_those_of_the_model(v4_kernels: dict[str, Any], models: dict[str, Path]) -> None:
    """transformers' own model, as for V3.2: 0.01 to 0.06 were found, by kernels and by references.

    If no token attends to the entries of 128 tokens, it is 0.10 and 0.14 for the requests that have such.
    """
    from transformers import DeepseekV4ForCausalLM

    original = DeepseekV4ForCausalLM.from_pretrained(models["v4"], dtype=torch.float32)
    found = distances(v4_kernels, original)
    assert all(distance < 0.08 for distance in found.values()), found


def test_v41_through_shared_caches_and_blocks(v41_kernels: dict[str, Any]) -> None:
    """A layer of each kind, replay of the window, a prefix in the caches of all groups; vLLM writes them."""
    calls = v41_kernels["calls"]
    assert v41_kernels["attention"] == ["XmlaV41Attention"]
    assert v41_kernels["cached"] == 64  # a page
    assert len(calls) == 10 and min(calls.values()) >= 4, calls


def test_v41_tokens_are_those_of_the_references(
    v41_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    reference = serve("--reference", model=models["v41"])
    assert reference["calls"] == v41_kernels["calls"]
    assert reference["tokens"] == v41_kernels["tokens"]


def test_v41_tokens_of_gathered_prefills(
    v41_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """As on Hopper: windows and the source layers' entries of a step's prefills as rows."""
    gathered = serve("--gather", model=models["v41"])
    assert gathered["tokens"] == v41_kernels["tokens"]
    # Layers share what the host makes: pages of windows, again for the layers that vLLM runs on each request's last
    # tokens, and of entries of two kinds. Were it made in each, there would be three copies for every gather.
    assert gathered["calls"]["read_mla_cache"] > gathered["calls"]["copies to the device"] > 0
    assert gathered["calls"]["sparse_mla"] == v41_kernels["calls"]["sparse_mla"]


def test_v41_calls_beside_vllms_own(
    v41_kernels: dict[str, Any], serve: Callable[..., Any], models: dict[str, Path]
) -> None:
    """Hopper's, which score all keys and mask: equal blocks and entries, attention up to rounding to bfloat16."""
    found = serve("--beside", model=models["v41"])["beside"]
    assert found["selected"] > 500 and found["blocks"] > 150 and found["attended"] > 1000, found
    assert found["different"] == 0 and 0 < found["apart"] < 2**-7, found


def distances(served: dict[str, Any], original: Any) -> dict[str, float]:
    """The mean difference of each request's log-probabilities to those of transformers' model."""
    from serve import prompts

    found = {}
    for name, tokens in prompts(original.config.model_type).items():
        answer = served["tokens"][name]
        with torch.no_grad():
            logprobs = original(torch.tensor([tokens + answer])).logits[0].log_softmax(-1)
        want = logprobs[len(tokens) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0]
        found[name] = (want - torch.tensor(served["logprobs"][name])).abs().mean().item()
    return found


def test_where_vllm_takes_it(run: Callable[..., Any]) -> None:
    """By compute capability; for dense attention vLLM goes on to its own, for sparse attention to none."""
    done = run("xmla", str(FOLDER / "choose.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    refused = json.loads(done.stdout.splitlines()[-1])
    assert [*refused["fp8"]] == ARCHITECTURES
    assert refused["fp8"] == refused["bf16"] == refused["fp4"] == refused["ranks that share keys"]
    unserved = "nvfp4_ds_mla before vLLM 0.33, " if OLD else ""
    assert refused["fp4 of V4"].startswith(f"xmla.vllm: not served: {unserved}nvfp4_ds_mla of DeepSeek-V4; ")
    assert OLD or refused["fp4 of V41"] == "XmlaV41Attention"
    without_e4m3 = {"sm_80", "sm_86"} if OLD else set()
    assert {name for name, reasons in refused["fp8"].items() if reasons} == without_e4m3
    assert all(refused["fp8"][name] == ["compute capability not supported"] for name in without_e4m3)
    assert all("non-sparse not supported" in reasons for reasons in refused["dense"].values())
    served = {"auto", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"}
    assert served <= {*refused["caches"]} | ({"nvfp4_ds_mla"} if OLD else set())
    assert all(
        reasons == ([] if name in served else ["kv_cache_dtype not supported"])
        for name, reasons in refused["caches"].items()
    )
    assert refused["another"].startswith("No valid attention backend found"), refused["another"]
    assert "CUSTOM: [PCP not supported]" in refused["another"]
    whose = {"load_model": "warmup", "determine_available_memory": "warmup"}
    whose |= dict.fromkeys(("compile_or_warm_up_model", "execute_model", "save_selections"), "recording")
    assert refused["worker"] == {name: f"xmla.vllm.{module}" for name, module in whose.items()}
    versions = ["v4"] if OLD else ["v4", "v41"]
    assert refused["graphs"] == ["UNIFORM_BATCH"] * len(versions)  # not of a step with decodes and prefills
    own, ours = "DeepseekV4FlashMLAAttention", {"v4": "XmlaV4Attention", "v41": "XmlaV41Attention"}
    for each in versions:
        named = {"None": ours[each], "CUSTOM": ours[each], f"FLASHMLA_SPARSE_DS{each.upper()}": own}
        assert refused[each] == named
    for name, reasons in refused["dims"].items():  # vLLM asks for their sum alone
        latent, roped = name.split()
        other = f"512 latent dims, with 64 roped ones or none, not of {latent} latent and {roped} roped dims"
        told = [] if name in ("512 64", "512 0") else [f"xmla attends to entries of {other}"]
        assert [reason for reason in reasons if reason != "head_size not supported"] == told, name
    assert refused["micro-batches"] == ["xmla does not serve two micro-batches at once"]
    told = "two micro-batches at once, decode context parallelism of DeepSeek-V4"
    told = f"DSpark before vLLM 0.33, {told}" if OLD else told
    without = "without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
    images = {"v4": ", images of DeepSeek-V4", "v41": ""}
    assert refused["unserved"] == {each: f"xmla.vllm: not served: {told}{images[each]}; {without}" for each in versions}
    # The last three are V4's: widths of slots of all entries, twice, and its compressors' backend.
    assert OLD or refused["invariant"] == [False, [False, 0], 1, None, 256, 256, True]
    assert OLD or refused["sinks"] == dict.fromkeys(ARCHITECTURES, "XmlaSparseBackend")
    check_architectures(refused["architectures"])
    blackwell = {} if OLD else {name: ["DeepseekV41ForCausalLM"] for name in ("sm_100", "sm_103")}
    assert {name: models for name, models in refused["transfers"].items() if models} == blackwell
    dbo = "two micro-batches at once"
    newer = (
        "",
        "decode context parallelism of pooled keys, MXFP4 keys of pools, ",
        "logits of DeepSeek-V4.1's blocks alone (indexer_sparse_logits), ",
    )
    assert refused["start"] == [
        f"xmla.vllm: not served: {told}{dbo}; {without}"
        for told in (("MXFP4 keys of the indexer before vLLM 0.33, ",) if OLD else newer)
    ]


# Attention of each architecture of vLLM's registry that reads `index_topk`; refused by its name where there is none.
ATTENTION = {
    "DeepseekForCausalLM": "", "DeepseekV2ForCausalLM": "", "DeepseekV3ForCausalLM": "XmlaSparseBackend",
    "DeepseekV32ForCausalLM": "XmlaSparseBackend", "GlmMoeDsaForCausalLM": "XmlaSparseBackend",
    "Glm4MoeLiteForCausalLM": "XmlaSparseBackend", "MistralLarge3ForCausalLM": "XmlaSparseBackend",
    "DeepseekV4ForCausalLM": "XmlaV4Attention",
}  # fmt: skip
ATTENTION_SINCE_033 = {
    "HYV4ForCausalLM": "XmlaSparseBackend", "Glm5NextForCausalLM": "XmlaSparseBackend",
    "Glm5NextForConditionalGeneration": "XmlaSparseBackend", "DeepseekV4ForConditionalGeneration": "XmlaV4Attention",
    "DeepseekV41ForCausalLM": "XmlaV41Attention", "DeepseekV3BidirectionalModel": "", "Dots3NoteForCausalLM": "",
}  # fmt: skip


def check_architectures(found: dict[str, dict[str, str]]) -> None:
    """Check that each GPU gives xmla's attention, or a refusal by name. A new architecture has to be told here."""
    expected = ATTENTION if OLD else ATTENTION | ATTENTION_SINCE_033
    assert sorted(found) == sorted(expected)
    for architecture, attention in expected.items():
        for gpu, said in found[architecture].items():
            wanted = attention
            if not attention:
                wanted = f"xmla.vllm: not served: the architecture {architecture}; "
            elif attention != "XmlaSparseBackend" and gpu in ("sm_80", "sm_86", *(["sm_89"] if OLD else ())):
                wanted = f"xmla.vllm: not served: DeepSeek-V4 on {gpu}; "
            elif gpu in ("sm_80", "sm_86") and architecture.startswith("Glm5Next"):
                wanted = "xmla.vllm: not served: pooled keys on a GPU without e4m3; "
            elif gpu in ("sm_80", "sm_86") and OLD:
                wanted = "compute capability not supported"
            assert said.startswith(wanted), (architecture, gpu, said)


@pytest.mark.skipif(OLD, reason="new in 0.33")
def test_steps_by_the_metadata_of_newer_releases(run: Callable[..., Any]) -> None:
    """Rows of prefills that ranks share, and prefills that dense attention takes: those write keys and select none."""
    done = run("xmla", str(FOLDER / "parts.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == [True] * 3
    assert found["mapped"] == [False, True, False, False, True, False, False]
    assert found["written"] and found["keys"] == [True, True, True]
    assert found["quantized"] == [[0, 0, 0, 0]] * 4
    assert len(found["plain"]) == 7 and all(found["plain"].values()), found["plain"]
    assert len(found["pages"]) == 8, found["pages"]
    for digest, (whole, stride) in found["pages"].items():  # one decides what the other does
        told = dict(field.split("=") for field in digest.split(";"))
        entry = sum(int(part.partition(":")[2]) for part in told["parts"].replace("|", ",").split(","))
        assert (whole, stride) == (int(told["page"]) * entry, int(told["stride"]))
    assert found["dense"] == ["write_indexer_cache"]
    assert found["sparse"] == [["indexer_topk", "indexer_topk_paged", "write_indexer_cache"]] * 5


def test_every_change_is_told_with_what_would_remove_it(run: Callable[..., Any]) -> None:
    every = " + ".join(
        f"patches.{kind}PATCHES"
        for kind in ("", "POOL_", "FP4_", "FP4_KEY_", "CUTEDSL_FP4_KEY_", "INVARIANCE_", "V4_INVARIANCE_", "E4M3_")
    )
    done = run("", "-c", f"from xmla.vllm import patches; print(*(patch.name for patch in {every}))")
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.splitlines()[-1].split()
    _, _, told = (ROOT / "docs/for_maintainers.md").read_text().partition("## What vLLM would need")
    table = told.partition("##")[0]
    assert len(names) > 10 and [name for name in names if f"`{name}`" not in table] == []


REGISTERED = """
import sys
from xmla.vllm import register
register()
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(AttentionBackendEnum.CUSTOM.is_overridden(), sparse_attn_indexer.has_deep_gemm.__module__)
"""


@pytest.mark.parametrize("plugins", ["", "another,xmlas"])
def test_a_process_that_does_not_name_xmla_is_left_alone(plugins: str, run: Callable[..., Any]) -> None:
    done = run(plugins, "-c", REGISTERED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "False vllm.utils.import_utils"


MISSING = """
from vllm.model_executor.layers import sparse_attn_indexer
del sparse_attn_indexer.has_deep_gemm
from xmla.vllm import register
register()
"""


def test_what_is_replaced_has_to_be_there(run: Callable[..., Any]) -> None:
    done = run("xmla", "-c", MISSING)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith(
            f"xmla.core.errors.UnsupportedError: xmla.vllm: vLLM {release()} has no "
            "vllm.model_executor.layers.sparse_attn_indexer.has_deep_gemm, which xmla replaces ("
        )
    )


UNTESTED = """
import xmla.vllm
xmla.vllm.TESTED = ("0.25",)
xmla.vllm.register()
"""


def test_another_release_is_named(run: Callable[..., Any]) -> None:
    done = run("xmla", "-c", UNTESTED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"vLLM {release()}: xmla is tested with 0.25" in done.stdout + done.stderr
