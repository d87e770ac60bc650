from xmla.core.call import Problem
from xmla.core.ops.slots.resolve_slots.kernels import resolve_slots_kernel
from xmla.core.plan import Launch, Plan
from xmla.core.values import Device, Spec

# Columns and places of a step. On an H100 21.4 µs for one request of 2048 columns and 4096 places, 174 for 256 of them;
# 1024 by 8 warps take 24.6 and 241 (benchmarks/log/resolve_slots.md).
BLOCK, WARPS = 2048, 16


def plan(problem: Problem, device: Device) -> Plan:
    requests, places, entries = problem["B"], problem["PLACES"], problem.attrs.num_entries
    of_places = Spec((requests, places), "int32")
    workspace = {
        "place_of": Spec((requests, entries), "int32"),
        "named": of_places,
        "new_held": of_places,
        "new_slots": of_places,
    }
    launch = Launch(
        resolve_slots_kernel,
        grid=(requests,),
        outputs=(*problem.results, *workspace),
        sizes={
            "num_keys": problem["K"],
            "index_stride": problem.specs["indices"].stride(0),
            "next_n": problem["T"] // max(requests, 1),
            "num_columns": problem.results["missing"].shape[1],
            "held_stride": problem.specs["held"].stride(0),
            "slot_stride": problem.specs["slots"].stride(0),
            "num_places": places,
            "num_entries": entries,
        },
        constexprs={"BLOCK": BLOCK},
        num_warps=WARPS,
    )
    return Plan((launch,), {**problem.results, **workspace}, tuple(problem.results))
