from xmla.core.call import Problem, tokens_a_request
from xmla.core.ops.slots.window_slots.kernels import window_slots_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device

BLOCKS = (128, 1024)  # slots of a step; few, since each is a kernel


def plan(problem: Problem, device: Device) -> Plan:
    attrs, window = problem.attrs, problem.attrs.window
    block = next((block for block in BLOCKS if window <= block), BLOCKS[-1])
    results = problem.results
    launch = Launch(
        window_slots_kernel,
        grid=(problem["T"],),
        outputs=("slots", "counts"),
        arrays=problem.stand_ins(request_ids="lengths"),
        sizes={
            "window": window,
            "num_requests": problem["B"],
            "table_stride": problem.specs["block_table"].stride(0),
            "table_width": problem["M"],
            "next_n": tokens_a_request(problem),
        },
        constexprs={
            "UNIT": results["slots"].vector(window),
            "PAGE_SIZE": attrs.page_size,
            "RATIO": attrs.ratio,
            "HAS_REQUEST_IDS": problem.has("request_ids"),
            "BLOCK_K": block,
            "ONE_STEP": window <= block,
        },
    )
    return Plan((launch,), results, ("slots", "counts"))
