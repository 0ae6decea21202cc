"""Markdown for the tables of measured results."""

from recipes.bench.common.results import Data


def where(data: Data) -> str:
    """Device, torch and date in one line; the file says the rest."""
    env = data["environment"]
    torch = env["versions"].get("torch", "")
    devices = f"{env['num_devices']} x " if env["num_devices"] > 1 else ""
    cpus = "" if "CPU" in env["device"] else f", {env['num_cpus']} CPU cores"
    date = env.get("date", "")
    return f"{devices}{env['device']}{cpus}; torch {torch}; {date}"


def section(text: str, head: list[str], rows: list[list[str]]) -> str:
    """A paragraph and its table; empty where nothing was recorded."""
    return f"{text}\n\n{markdown(head, rows)}" if rows else ""


def markdown(head: list[str], rows: list[list[str]], column: str = "--:") -> str:
    """A table; `column` draws the line under every head but the first."""
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("|--|" + f"{column}|" * (len(head) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
