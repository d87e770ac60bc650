from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    ids = problem.has("request_ids")
    launch = Launch(
        map_slots_kernel,
        grid=(problem["T"],),
        inputs=("indices", "block_table", problem.either("request_ids", "indices")),
        sizes=(problem["B"], specs["block_table"].stride(0), problem["M"], problem.tokens_a_request),
        outputs=("slots", "counts"),
        constexprs=(
            ("INDEX_STRIDE", specs["indices"].stride(0)),
            ("K", problem["K"]),
            ("PAGE_SIZE", problem.attrs["page_size"]),
            ("HAS_REQUEST_IDS", ids),
            ("COMPACT", problem.attrs["compact"]),
            ("BLOCK_K", min(2048, max(16, next_power_of_2(problem["K"])))),
        ),
    )
    return Plan((launch,), problem.op.result_specs(problem), ("slots", "counts"))
