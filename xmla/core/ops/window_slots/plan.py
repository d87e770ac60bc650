from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.window_slots.kernels import window_slots_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2
from xmla.core.requests import tokens_a_request


def plan(problem: Problem, device: Device) -> Plan:
    attrs = problem.attrs
    launch = Launch(
        window_slots_kernel,
        grid=(problem["T"],),
        outputs=("slots", "counts"),
        arrays=problem.stand_ins(request_ids="lengths"),
        sizes={
            "num_requests": problem["B"],
            "table_stride": problem.specs["block_table"].stride(0),
            "table_width": problem["M"],
            "next_n": tokens_a_request(problem),
        },
        constexprs={
            "WINDOW": attrs["window"],
            "PAGE_SIZE": attrs["page_size"],
            "RATIO": attrs["ratio"],
            "HAS_REQUEST_IDS": problem.has("request_ids"),
            "BLOCK_K": min(1024, max(16, next_power_of_2(attrs["window"]))),
        },
    )
    return Plan((launch,), problem.op.result_specs(problem), ("slots", "counts"))
