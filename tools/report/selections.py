"""The selection of rows of each kind beside its peers, of which some are wrong; ratios are speeds, above 1 faster than
the peer."""

from pathlib import Path
from statistics import geometric_mean

from tools.report.markdown import table
from tools.report.results import Line, read
from xmla.bench.provenance import origin


def best_exact(line: Line) -> float:
    """The ratio to the fastest peer whose rows are all right."""
    wrong = line.get("wrong_peers", ())
    return min(ratio for peer, ratio in line["ratio_to_peer"].items() if peer not in wrong)


def report(file: Path) -> str:
    """Markdown: a line for each kind of rows."""
    ((head, *lines),) = read(file)
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        kinds.setdefault(line["case"].partition(", ")[2] or "normal", []).append(line)
    peers = list(dict.fromkeys(peer for line in lines for peer in line["ratio_to_peer"]))
    rows = []
    for kind, cases in kinds.items():
        ratios = [best_exact(line) for line in cases]
        wrong = [sum(peer in line.get("wrong_peers", ()) for line in cases) for peer in peers]
        middle = f"{geometric_mean(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([kind, str(len(cases)), middle, str(sum(ratio >= 1.1 for ratio in ratios)), *map(str, wrong)])
    columns = ["rows", "cases", "beside the best exact peer", "1.1 × or more", *(f"{peer} wrong" for peer in peers)]
    return "\n".join([f"{origin(head)}:", "", *table(columns, rows)]) + "\n"
