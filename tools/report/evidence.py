"""What has run on a device, and what it found.

Its test.jsonl has runs of the test suite, contract.jsonl of the fuzzer, alone or under a tool of compute-sanitizer.
`python -m tools.on_gpus` makes both. What ran at one commit is one run, in any number of parts. Of the suite the last
run is told, and the last whole one if that is another; of each op the last run of the fuzzer, and of each tool. A
line's "remark", if somebody gave it one, is told with it. A line that "resumes" ran what had not passed in the lines of
the same paths before it.
"""

import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.core.registry import registry

SUITE = "tests"  # the folder of all tests, as a command's argument
TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")
OUTCOME = re.compile(r"(\d+) (passed|failed|error|skipped)")
FUZZERS = {"tools.fuzz", "tests/fuzz.py"}  # the second in lines of before tools/
FUZZED = re.compile(r"(\w+): (\d+) cases(?: of (\d+) of (\d+) shapes)?, (\d+) failures")
CUT, REPORTED = 124, 9  # exit codes: of `timeout`, and of a tool that found something
NOT_RUN = "not run yet"
FEW = 8  # ops of a row that has their names
Row = tuple[str, str, str, str]  # what ran, of which, at which commit and by which Triton, what it found


def lines_of(file: Path) -> list[Line]:
    """The commands of a file; of their commits the first seven digits, without remarks."""
    return [head | {"commit": head["commit"][:7]} for head, *_ in read(file)]


def remarks(lines: Iterable[Line]) -> list[str]:
    """What somebody wrote beside results, for those who read their table."""
    return [*dict.fromkeys(line["remark"] for line in lines if "remark" in line)]


def at(commit: str, lines: Iterable[Line]) -> str:
    """The commit, and the Triton that compiled its kernels."""
    return f"{commit}, {' and '.join(sorted({line['versions']['triton'] for line in lines}))}"


def outcome(line: Line) -> Counter[str]:
    """How many tests passed, failed and so on, by pytest's last line; none if it was killed before."""
    last = line["last_lines"][-1]
    return Counter({kind: int(count) for count, kind in OUTCOME.findall(last)} if " in " in last else {})


def outcome_of(lines: list[Line]) -> Counter[str]:
    """How many tests passed, failed and so on in a run and those that resume it: what failed ran again in the next."""
    *before, last = map(outcome, lines)
    return last + sum((Counter({"passed": each["passed"]}) for each in before), Counter[str]())


@dataclass(slots=True)
class Suite:
    """The tests that ran at one commit.

    Attributes:
        parts: The commands by their paths: of several with the same paths the last, behind those that it resumes.
        ignored: Paths that a command left to another.
    """

    parts: dict[frozenset[str], list[Line]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)

    def add(self, line: Line) -> None:
        _, _, arguments = line["command"].partition(" pytest ")
        words = shlex.split(arguments)
        paths = frozenset(word for word in words if word.startswith(SUITE))
        if paths and "-k" not in words and not any("::" in path for path in paths):
            self.parts[paths] = [*(self.parts.get(paths, ()) if line.get("resumes") else ()), line]
            self.ignored.update(word.removeprefix("--ignore=") for word in words if word.startswith("--ignore="))

    @property
    def of_all(self) -> bool:
        """Whether a command took all tests but those that it ignored."""
        return any(SUITE in paths for paths in self.parts)

    @property
    def left_out(self) -> list[str]:
        return sorted(self.ignored.difference(*self.parts))

    @property
    def cut(self) -> list[Line]:
        return [lines[-1] for lines in self.parts.values() if lines[-1]["exit_code"] == CUT]

    @property
    def whole(self) -> bool:
        return self.of_all and not self.left_out and not self.cut

    def row(self, commit: str) -> Row:
        lines = [line for part in self.parts.values() for line in part]
        counts = sum(map(outcome_of, self.parts.values()), Counter[str]())
        wrong = counts["failed"] + counts["error"]
        gpus = max(len(line["versions"]["devices"]) for line in lines)
        of = [f"all, on {gpus} GPUs" if self.whole else f"on {gpus} GPUs"]
        if self.left_out:
            of.append("without " + ", ".join(f"`{path.removeprefix('tests/')}`" for path in self.left_out))
        if self.cut:
            # Of a command that was killed before it told how many there are nothing is known but that.
            missed = [line["collected"] - outcome(line).total() for line in self.cut if "collected" in line]
            of.append(f"cut by its time: {sum(missed) if len(missed) == len(self.cut) else 'some'} tests not reached")
        outcomes = "; ".join([f"{counts['passed']} passed, {wrong or 'none'} failed", *remarks(lines)])
        return "test suite", "; ".join(of), at(commit, lines), outcomes


def suites(lines: Iterable[Line]) -> list[Row]:
    """The last run of the suite, and the last whole one."""
    by_commit: defaultdict[str, Suite] = defaultdict(Suite)
    for line in lines:
        by_commit[line["commit"]].add(line)
    latest = [(commit, suite) for commit, suite in reversed(by_commit.items()) if suite.of_all]
    whole = next(each for each in latest if each[1].whole)
    return [suite.row(commit) for commit, suite in dict([latest[0], whole]).items()]


@dataclass(slots=True)
class Fuzzed:
    """What ran of an op at one commit, by these commands.

    Attributes:
        shapes: How many ran, of how many; 0 where the commands do not tell. Of several the most.
    """

    commands: list[Line] = field(default_factory=list)
    cases: int = 0
    failures: int = 0
    shapes: tuple[int, int] = 0, 0

    def add(self, command: Line, cases: str, reached: str | None, shapes: str | None, failures: str) -> None:
        self.commands.append(command)
        self.cases += int(cases)
        self.failures += int(failures)
        self.shapes = max(self.shapes, (int(reached or 0), int(shapes or 0)))


def last_runs(lines: Iterable[Line], tool: str | None) -> dict[str, tuple[str, Fuzzed]]:
    """The commit of the fuzzer's last run of each op, alone or under a tool, and what ran."""
    runs: defaultdict[tuple[str, str], Fuzzed] = defaultdict(Fuzzed)
    for line in lines:
        words = shlex.split(line["command"])
        under = words[words.index("--tool") + 1] if "--tool" in words else None
        if not FUZZERS.isdisjoint(words) and under == tool:
            for match in filter(None, map(FUZZED.fullmatch, line["last_lines"])):
                op, cases, *counts = match.groups()
                if int(cases):
                    runs[line["commit"], op].add(line, cases, *counts)
    return {op: (commit, ran) for (commit, op), ran in runs.items() if op in registry()}


def named(ops: Iterable[str]) -> str:
    return ", ".join(f"`{op}`" for op in ops)


def fuzzer_rows(lines: list[Line], tool: str | None) -> Iterator[tuple[str, str, str]]:
    """What the fuzzer ran, at which commit, and what it found: a row for each commit with an op's last run."""
    by_commit: dict[str, dict[str, Fuzzed]] = {line["commit"]: {} for line in reversed(lines)}
    for op, (commit, ran) in sorted(last_runs(lines, tool).items()):
        by_commit[commit][op] = ran
    for commit, ops in by_commit.items():
        if ops:
            commands = [command for ran in ops.values() for command in ran.commands]
            failures = sum(ran.failures for ran in ops.values())
            cases = sum(ran.cases for ran in ops.values())
            outcomes = [f"{failures} failed"] * bool(failures)
            outcomes += ["reports, see below"] * any(command["exit_code"] == REPORTED for command in commands)
            of = named(ops) if len(ops) <= FEW else f"{len(ops)} ops"
            yield (
                f"{cases:,} cases of {of}",
                at(commit, commands),
                "; ".join([*(outcomes or ["clean"]), *remarks(commands)]),
            )
    if missing := sorted(registry().keys() - {op for ops in by_commit.values() for op in ops}):
        yield named(missing), "", NOT_RUN


def unreached(lines: list[Line]) -> Iterator[tuple[str, str]]:
    """The ops of which the fuzzer's last run did not take every shape, and how many it took."""
    for op, (_, ran) in sorted(last_runs(lines, None).items()):
        reached, shapes = ran.shapes
        if reached < shapes:
            yield f"`{op}`", f"{reached} of {shapes}"


def report(suite: Path, fuzzer: Path) -> str:
    """Markdown: a row of each run, then the shapes that the fuzzer's last runs took, where these are not all."""
    fuzzing = lines_of(fuzzer)
    rows = [*suites(lines_of(suite)), *(("fuzzer", *row) for row in fuzzer_rows(fuzzing, None))]
    same: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for tool in TOOLS:
        for row in fuzzer_rows(fuzzing, tool):
            same[row].append(tool)
    checked = [(", ".join(tools), *row) for row, tools in same.items()]
    rows += sorted(checked, key=lambda row: row[-1] == NOT_RUN)
    markdown = table(("what", "scope", "commit, Triton", "result"), rows)
    if shapes := [*unreached(fuzzing)]:
        markdown += [
            "",
            "The fuzzer's last run did not take every shape of these:",
            "",
            *table(("op", "shapes"), shapes),
        ]
    return "\n".join([*markdown, ""])
