from xmla.core.device import Device
from xmla.core.layout import indexer_layouts
from xmla.core.op import Problem
from xmla.core.ops.write_indexer_cache.kernels import write_indexer_cache_kernel
from xmla.core.plan import Launch, Plan, cdiv

BLOCK_T = 16


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    (layout,) = indexer_layouts(problem["ROW"], problem["D"])
    launch = Launch(
        write_indexer_cache_kernel,
        grid=(cdiv(problem["T"], BLOCK_T),),
        inputs=("keys", "slots", "cache"),
        sizes=(problem["T"], problem["P"] * problem["R"]),
        outputs=(),
        constexprs=(
            ("KEY_STRIDE", specs["keys"].stride(0)),
            ("SLOT_STRIDE", specs["slots"].stride(0)),
            ("PAGE_STRIDE", specs["cache"].stride(0)),
            ("PAGE_SIZE", problem["R"]),
            ("D", problem["D"]),
            ("MXFP4", layout.format == "mxfp4"),
            ("MIN_EXPONENT", layout.min_exponent),
            ("BLOCK_T", BLOCK_T),
        ),
    )
    return Plan((launch,), {}, ())
