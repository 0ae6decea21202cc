"""Markdown for the tables of measured results."""

from typing import Any

Data = dict[str, Any]


def where(data: Data) -> str:
    """Device, versions and command in one line."""
    env = data["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(env["versions"].items()))
    return f"{env['device']}; {versions}; `{env['command']}`"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|--|" + "--:|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
