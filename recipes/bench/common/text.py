"""Markdown for the tables of measured results."""

from typing import Any

Data = dict[str, Any]


def where(data: Data) -> str:
    """Device, versions and command in one line."""
    env = data["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(env["versions"].items()))
    devices = f"{env['num_devices']} x " if env["num_devices"] > 1 else ""
    cpus = "" if "CPU" in env["device"] else f", {env['num_cpus']} CPU cores"
    return f"{devices}{env['device']}{cpus}; {versions}; `{env['command']}`"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table, numbers to the right."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|--|" + "--:|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
