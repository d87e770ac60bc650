"""The roofline's constant per launch: the time from one launch of a CUDA graph to the next.

python -m benchmarks.launch_time
"""

import torch

from xmla import torch_api

LAUNCHES = 200, 1200  # of two graphs: their times differ by a thousand launches, so by as many ms as a launch has µs
REPLAYS = 20


def least_ms(launches: int) -> float:
    """The shortest replay of a graph of so many launches of a kernel that does next to nothing."""
    indices, table = (torch.zeros(1, size, dtype=torch.int32, device="cuda") for size in (16, 4))
    out = torch.empty_like(indices), torch.empty(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch_api.map_slots(indices, table, page_size=64, out=out)
    with torch.cuda.graph(graph):
        for _ in range(launches):
            torch_api.map_slots(indices, table, page_size=64, out=out)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times)


if __name__ == "__main__":
    few, many = map(least_ms, LAUNCHES)
    print(f"{many - few:.2f} µs from one launch of map_slots on a row to the next")
