"""`xmla layouts`: the digest of a cache's layout, and in which fields two layouts differ."""

import json

import typer

from xmla.core.errors import ArgumentError
from xmla.layouts import differences, digest


def digest_of(text: str) -> str:
    """What is named as FORMAT:PAGE, such as v32:64; a digest is itself."""
    if "=" in text:
        return text
    name, _, page = text.partition(":")
    if not page.isdecimal():
        raise ArgumentError(f"layouts: got {text!r}, expected a digest or FORMAT:PAGE, such as v32:64")
    return digest(name, int(page))


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
