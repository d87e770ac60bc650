"""`xmla layouts`: the digest of a cache's layout, and in which fields two layouts differ."""

import json

import typer

from xmla.core.errors import ArgumentError
from xmla.layouts import differences, digest


def digest_of(text: str) -> str:
    """What is named as FORMAT:PAGE, such as v32:64, of plain rows with their dtype; a digest is itself."""
    if "=" in text:
        return text
    name, page, dtype, *rest = (*text.split(":"), None, None)
    if not page or not page.isdecimal() or dtype == "" or any(rest):
        expected = "a digest or FORMAT:PAGE, such as v32:64, of plain rows plain:64:bfloat16"
        raise ArgumentError(f"layouts: got {text!r}, expected {expected}")
    return digest(str(name), int(page), dtype=dtype)


def check(first: str, second: str, as_json: bool) -> bool:
    """Print in which fields two layouts differ, one a line or as JSON; whether they are the same."""
    fields = differences(digest_of(first), digest_of(second))
    if as_json:
        typer.echo(json.dumps({"same": not fields, "fields": fields}))
        return not fields
    for field, (ours, theirs) in fields.items():
        typer.echo(f"{field}: {ours}, {theirs}")
    if not fields:
        typer.echo("the same layout: pages can be moved as bytes")
    return not fields
