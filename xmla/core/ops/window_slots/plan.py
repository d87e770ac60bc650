from xmla.core.device import Device
from xmla.core.op import Problem
from xmla.core.ops.window_slots.kernels import window_slots_kernel
from xmla.core.plan import Launch, Plan, next_power_of_2


def plan(problem: Problem, device: Device) -> Plan:
    specs, attrs = problem.specs, problem.attrs
    ids = problem.has("request_ids")
    launch = Launch(
        window_slots_kernel,
        grid=(problem["T"],),
        inputs=("block_table", "lengths", problem.either("request_ids", "lengths")),
        sizes=(
            problem["B"],
            specs["block_table"].stride(0),
            problem["M"],
            problem.tokens_a_request,
        ),
        outputs=("slots", "counts"),
        constexprs=(
            ("WINDOW", attrs["window"]),
            ("PAGE_SIZE", attrs["page_size"]),
            ("RATIO", attrs["ratio"]),
            ("HAS_REQUEST_IDS", ids),
            ("BLOCK_K", min(1024, max(16, next_power_of_2(attrs["window"])))),
        ),
    )
    return Plan((launch,), problem.op.result_specs(problem), ("slots", "counts"))
