"""Markdown for the tables of measured results."""

from recipes.bench.common.results import Data


def where(data: Data) -> str:
    """Device, versions and command in one line."""
    env = data["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in sorted(env["versions"].items()))
    devices = f"{env['num_devices']} x " if env["num_devices"] > 1 else ""
    cpus = "" if "CPU" in env["device"] else f", {env['num_cpus']} CPU cores"
    return f"{devices}{env['device']}{cpus}; {versions}; `{env['command']}`"


def markdown(head: list[str], rows: list[list[str]], column: str = "--:") -> str:
    """A table; `column` draws the line under every head but the first."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|--|" + f"{column}|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
