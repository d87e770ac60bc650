"""A program as XLA has compiled it: its calls of kernels, the memory of their operands and results, what is moved.

Read from the text of the optimised HLO and from XLA's dump of the assignment of its buffers. What is not where it is
looked for raises: a release of XLA that writes these otherwise is noticed.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from xmla.jax_api._launcher import TARGET

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
# What takes another's memory, or runs computations whose instructions are looked at themselves.
MOVES_NOTHING = {
    "async-done", "async-start", "bitcast", "call", "conditional", "constant", "copy-done", "fusion-done",
    "get-tuple-element", "opt-barrier", "parameter", "tuple", "while",
}  # fmt: skip

Array = tuple[str, int]  # XLA's name of a dtype, elements


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # of a parameter its number
    attributes: str
    root: bool

    @property
    def launches(self) -> bool:
        return self.opcode == "custom-call" and f'custom_call_target="{TARGET}"' in self.attributes

    @property
    def computations(self) -> list[str]:
        """The names of those that it runs."""
        names = re.findall(r"(?:calls|body|condition|to_apply|(?:true|false)_computation)=%([^,\s]+)", self.attributes)
        for branches in re.findall(r"branch_computations=\{([^}]*)\}", self.attributes):
            names += [name.strip().removeprefix("%") for name in branches.split(",")]
        return names

    @property
    def aliases(self) -> dict[int, int]:
        """Which operand's memory a result takes, by the result's index."""
        pairs = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        places = re.findall(r"\{(\d*)\}: \((\d+),", pairs[1]) if pairs else []
        return {int(result or 0): int(operand) for result, operand in places}

    @property
    def arrays(self) -> list[Array]:
        return [(dtype, prod(map(int, filter(None, sizes.split(","))))) for dtype, sizes in ARRAY.findall(self.shape)]

    def place_name(self, result: int) -> str:
        """What the assignment of buffers calls a result."""
        return f"{self.name} {{{result}}}" if self.shape.startswith("(") else self.name


Computation = dict[str, Instruction]


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the one that is run."""
    computations: dict[str, Computation] = {}
    entry = ""
    for line in text.splitlines():
        if start := re.match(r"(ENTRY )?%(\S+) \(.*\{$", line):
            computation = computations[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif each := re.match(r"\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)", line):
            root, name, shape, opcode, operands, attributes = each.groups()
            names = re.findall(r"%([^,\s]+)", operands) if opcode != "parameter" else [operands]
            computation[name] = Instruction(name, shape, opcode, tuple(names), attributes, bool(root))
    return computations, entry


@dataclass(frozen=True)
class Place:
    allocation: int
    offset: int
    size: int

    def overlaps(self, other: "Place") -> bool:
        apart = self.offset + self.size <= other.offset or other.offset + other.size <= self.offset
        return self.allocation == other.allocation and not apart


def _places(assignment: str, values: str) -> dict[str, Place]:
    """The memory of each instruction's result, an element of a tuple by `NAME {INDEX}`."""
    of_value: dict[str, Place] = {}
    allocation = -1
    for line in assignment.splitlines():
        if start := re.match(r"allocation (\d+):", line):
            allocation = int(start[1])
        elif value := re.match(r" value: <(\d+) .*?\(size=(\d+),offset=(\d+)\)", line):
            of_value[value[1]] = Place(allocation, int(value[3]), int(value[2]))
    places: dict[str, Place] = {}
    for value, positions in re.findall(r"^<(\d+) .*\n positions:\n((?:  .*\n)*)", values, re.MULTILINE):
        places |= {position.strip(): of_value[value] for position in positions.splitlines() if value in of_value}
    return places


@dataclass(frozen=True)
class Launch:
    """A custom call where it runs, by itself or in a fusion with slices of its operands and stores of its results."""

    call: Instruction
    times: int
    fused: bool
    operands: list[Place]  # of a slice its stack's
    sliced: list[int]  # operands
    results: Mapping[int, Place]
    stored: bool  # into a part of another array, inside of the fusion


class Program:
    def __init__(self, text: str, assignment: str, values: str) -> None:
        self.computations, self.entry = _parse(text)
        self.places = _places(assignment, values)
        header = text.partition("\n")[0]
        donated = set(re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", header))
        kept = re.findall(r"^allocation (\d+): .*?(?:parameter (\d+)|constant)", assignment, re.MULTILINE)
        self.read_only = {int(allocation) for allocation, parameter in kept if parameter not in donated}

    def executed(self, computation: str = "", times: int = 1) -> Iterator[tuple[Computation, Instruction, int]]:
        """Each instruction outside of fusions and how often it runs: in a loop of unknown trips, or a branch, once."""
        instructions = self.computations[computation or self.entry]
        for instruction in instructions.values():
            yield instructions, instruction, times
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
                for name in instruction.computations:
                    yield from self.executed(name, times * int(trips[1] if trips else 1))

    @cached_property
    def launches(self) -> list[Launch]:
        launches = []
        for _, instruction, times in self.executed():
            if instruction.launches:
                launches.append(self._alone(instruction, times))
            elif instruction.opcode in ("fusion", "fusion-start"):
                body = self.computations[instruction.computations[0]]
                launches += [self._fused(call, body, instruction, times) for call in body.values() if call.launches]
        return launches

    @property
    def calls(self) -> int:
        return sum(launch.times for launch in self.launches)

    def added_in_any_order(self) -> list[str]:
        """The scatters, which on a GPU are atomics, that may add several numbers to one element."""
        every = (each for computation in self.computations.values() for each in computation.values())
        scatters = (each for each in every if each.opcode == "scatter")
        return [each.name for each in scatters if "unique_indices=true" not in each.attributes]

    def _alone(self, call: Instruction, times: int) -> Launch:
        operands = [self.places[name] for name in call.operands]
        results = {result: self.places[call.place_name(result)] for result in range(len(call.arrays))}
        return Launch(call, times, False, operands, [], results, False)

    def _fused(self, call: Instruction, body: Computation, fusion: Instruction, times: int) -> Launch:
        operands, sliced, results = [], [], {}
        for place, name in enumerate(call.operands):
            operand = _behind(body, body[name])
            while operand.opcode in ("slice", "dynamic-slice"):
                sliced.append(place)
                operand = _behind(body, body[operand.operands[0]])
            operands.append(self.places[fusion.operands[int(operand.operands[0])]])
        for place, element in enumerate(_elements(body)):
            if element is call:
                results |= {result: self.places[fusion.place_name(result)] for result in range(len(call.arrays))}
            elif element.opcode == "get-tuple-element" and body[element.operands[0]] is call:
                index = re.search(r"index=(\d+)", element.attributes)
                results[int(index[1])] = self.places[fusion.place_name(place)]  # pyrefly: ignore
        stored = any(each.opcode == "dynamic-update-slice" for each in body.values())
        return Launch(call, times, True, operands, sliced, results, stored)

    def faults(self, apart: bool = True) -> Iterator[str]:
        """What XLA has made of calls that kernels do not bear; `apart`: also of an array that is an operand twice."""
        for launch in self.launches:
            call, aliases = launch.call.name, launch.call.aliases
            if launch.stored:
                yield f"{call}: a result is stored into a part of an array, inside of a fusion"
            for result, operand in aliases.items():
                if operand in launch.sliced:
                    yield f"{call}: operand {operand}, which is updated, is a slice, inside of a fusion"
                elif launch.results.get(result) != launch.operands[operand]:
                    yield f"{call}: result {result} and operand {operand} are not in one place"
                elif launch.operands[operand].allocation in self.read_only:
                    yield f"{call}: operand {operand}, which is updated, is an argument that is not donated"
            for result, place in launch.results.items():
                for operand, other in enumerate(launch.operands):
                    twice = result in aliases and launch.operands[aliases[result]] == other
                    if aliases.get(result) != operand and place.overlaps(other) and (apart or not twice):
                        yield f"{call}: result {result} is written over operand {operand}"

    def moved(self, arrays: Collection[Array]) -> int:
        """How many such arrays are written by anything but the calls, of larger ones each part."""
        total = 0
        for computation, instruction, times in self.executed():
            for dtype, elements in self._written(computation, instruction):
                sizes = [size for name, size in set(arrays) if name == dtype and elements and elements % size == 0]
                total += times * (elements // max(sizes)) if sizes else 0
        return total

    def _written(self, computation: Computation, instruction: Instruction) -> list[Array]:
        if instruction.launches or instruction.opcode in MOVES_NOTHING:
            return []
        if instruction.opcode in ("fusion", "fusion-start"):
            body = self.computations[instruction.computations[0]]
            if any(each.launches for each in body.values()):
                return []
            return [array for each in _elements(body) if each.opcode != "parameter" for array in _update(body, each)]
        written = _update(computation, instruction)
        return written[:1] if instruction.opcode.endswith("-start") else written


def _behind(body: Computation, instruction: Instruction) -> Instruction:
    """What an instruction is in the same memory."""
    while instruction.opcode in ("bitcast", "copy-done", "opt-barrier"):
        instruction = body[instruction.operands[0]]
    return instruction


def _elements(body: Computation) -> list[Instruction]:
    """What a fusion returns."""
    root = next(each for each in body.values() if each.root)
    return [_behind(body, each) for each in ([body[n] for n in root.operands] if root.opcode == "tuple" else [root])]


def _update(body: Computation, instruction: Instruction) -> list[Array]:
    """The arrays that an instruction writes; of a stack that it updates, the part."""
    if instruction.opcode == "dynamic-update-slice":
        return body[instruction.operands[1]].arrays
    return instruction.arrays
