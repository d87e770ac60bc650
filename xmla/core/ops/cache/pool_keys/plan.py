from xmla.core.call import LARGEST_SIZE, Problem
from xmla.core.ops.cache.compress_kv.plan import compress
from xmla.core.plan import Plan
from xmla.core.values import Device

# What the compressor calls a key and its gate, and what stands in for what it does not read.
ARRAYS = {"kv": "keys", "score": "gates", "norm_weight": "ape", "cos_sin": "ape"}


def plan(problem: Problem, device: Device) -> Plan:
    min_exponent = problem.formats["cache"].min_exponent
    constants = {"E": 0, "EPS": 0.0, "HADAMARD": False}
    return compress(problem, device, ARRAYS, min_exponent, 4, {"num_angles": LARGEST_SIZE}, constants)
