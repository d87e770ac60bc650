from xmla.core.device import Device
from xmla.core.layout import IndexerLayout, indexer_layouts
from xmla.core.op import Problem
from xmla.core.ops.read_indexer_cache.kernels import read_indexer_cache_kernel
from xmla.core.plan import Launch, Plan, cdiv

BLOCK_T = 16


def layouts_of(problem: Problem) -> list[IndexerLayout]:
    """The layouts that the cache's rows and the `cache_format` asked for allow."""
    return indexer_layouts(problem["ROW"], form=problem.attrs["cache_format"])


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    launch = Launch(
        read_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        inputs=("cache", "slots"),
        sizes=(problem["T"], problem["P"] * problem["R"]),
        outputs=("keys", "key_scales"),
        constexprs=(
            ("SLOT_STRIDE", specs["slots"].stride(0)),
            ("PAGE_STRIDE", specs["cache"].stride(0)),
            ("PAGE_SIZE", problem["R"]),
            ("VALUE_BYTES", layouts_of(problem)[0].value_bytes),
            ("BLOCK_T", BLOCK_T),
        ),
    )
    return Plan((launch,), problem.op.result_specs(problem), ("keys", "key_scales"))
