"""Plans: launches by name, how they are joined, fused and divided, implementations and which one a call takes."""

from xmla.core.plan.chunking import Parts, Rows, divided, fewest_of_a_part, in_parts
from xmla.core.plan.clearing import clear
from xmla.core.plan.fusion import Fusion, fuse
from xmla.core.plan.implementation import ON_HOPPER, Condition, Implementation, choose, on_gpus
from xmla.core.plan.overlap import overlap_launches, overlap_limit
from xmla.core.plan.plan import (
    ALIGNMENT,
    Choice,
    Constants,
    Kernel,
    Launch,
    Part,
    Plan,
    constants_by_name,
    join,
    most_registers,
)
from xmla.core.plan.roofline import estimate

__all__ = [
    "ALIGNMENT",
    "ON_HOPPER",
    "Choice",
    "Condition",
    "Constants",
    "Fusion",
    "Implementation",
    "Kernel",
    "Launch",
    "Part",
    "Parts",
    "Plan",
    "Rows",
    "choose",
    "clear",
    "constants_by_name",
    "divided",
    "estimate",
    "fewest_of_a_part",
    "fuse",
    "in_parts",
    "join",
    "most_registers",
    "on_gpus",
    "overlap_launches",
    "overlap_limit",
]
