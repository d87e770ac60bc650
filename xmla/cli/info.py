"""`xmla info`: what a bug report needs."""

import json

from rich.console import Console
from rich.table import Table

from xmla.machine.facts import collect


def show_info(as_json: bool) -> None:
    """Print the facts as a table, or as JSON."""
    facts = collect()
    if as_json:
        print(json.dumps(facts))
        return
    table = Table("", "", show_header=False)
    for name, value in facts.items():
        table.add_row(name, "\n".join(value) if isinstance(value, list) else value)
    Console(markup=False).print(table)
