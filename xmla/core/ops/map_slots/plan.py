from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.map_slots.kernels import map_slots_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.requests import tokens_a_request


def plan(problem: Problem, device: Device) -> Plan:
    specs = problem.specs
    launch = Launch(
        map_slots_kernel,
        grid=(problem["T"],),
        outputs=("slots", "counts"),
        arrays=problem.stand_ins(request_ids="indices"),
        sizes={
            "num_requests": problem["B"],
            "table_stride": specs["block_table"].stride(0),
            "table_width": problem["M"],
            "next_n": tokens_a_request(problem),
        },
        constexprs={
            "INDEX_STRIDE": specs["indices"].stride(0),
            "K": problem["K"],
            "PAGE_SIZE": problem.attrs["page_size"],
            "HAS_REQUEST_IDS": problem.has("request_ids"),
            "COMPACT": problem.attrs["compact"],
            "BLOCK_K": min(2048, max(16, next_power_of_2(problem["K"]))),
        },
    )
    return Plan((launch,), problem.op.result_specs(problem), ("slots", "counts"))
