"""`ssdtrain graph bfs | sssp | components | pagerank FILE`."""

import argparse
import csv
import json
import os
import sys
import time
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pydirect.traversal.bfs import bfs
from pydirect.traversal.components import connected_components
from pydirect.traversal.files import GraphFile, read_graph
from pydirect.traversal.pagerank import pagerank
from pydirect.traversal.placed import PlacedGraph, place
from pydirect.traversal.predecessors import predecessors
from pydirect.traversal.sssp import sssp
from pydirect.traversal.walk import Step, Trace

QUESTIONS = {
    "bfs": "edges from the nearest source to each node",
    "sssp": "lengths of the shortest paths from the nearest source",
    "components": "weakly connected components: the smallest node of each",
    "pagerank": "ranks, whose sum is 1",
}
EXAMPLES = """examples:
  ssdtrain graph bfs roads.txt.gz --source 17 --picture levels.png
  ssdtrain graph sssp roads.mtx --source 17,90 --predecessors --out paths.npz
  ssdtrain graph pagerank web.tsv --weighted --personalize 5,6 --out ranks.tsv
  ssdtrain graph components wiki.npz --undirected --json

FILE: lines of source, target and weight (.txt, .csv, .tsv, ...), Matrix Market (.mtx),
arrays (.npz of scipy or with edge_index, .npy), networkx (.graphml, .gml, .json);
.gz, .xz and .bz2 after any of them. Exit status: 0, 1 when pagerank did not converge,
2 for a file or a setting that cannot work.
"""
_NOTE_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `run` reads."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "question",
        choices=QUESTIONS,
        metavar="QUESTION",
        help="; ".join(f"{name}: {text}" for name, text in QUESTIONS.items()),
    )
    parser.add_argument("file", metavar="FILE", help="the graph")
    parser.add_argument(
        "--source", metavar="NODE,...", help="bfs, sssp: where paths begin"
    )
    parser.add_argument(
        "--predecessors",
        action="store_true",
        help="bfs, sssp: also the node before each on a path",
    )
    parser.add_argument(
        "--weighted", action="store_true", help="pagerank: shares go by weights"
    )
    parser.add_argument(
        "--personalize", metavar="NODE,...", help="pagerank: where walks begin anew"
    )
    parser.add_argument(
        "--damping", type=float, help="pagerank: chance of an edge (default: 0.85)"
    )
    parser.add_argument(
        "--tolerance", type=float, help="pagerank: change to stop at (default: 1e-6)"
    )
    parser.add_argument("--max-iterations", type=int, help="pagerank: stop there")
    parser.add_argument(
        "--undirected", action="store_true", help="edges lead both ways"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="nodes are 0 to N-1, those without edges too (default: those of FILE)",
    )
    parser.add_argument(
        "--device", default="auto", help="cuda, cuda:1 or cpu (default: auto)"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the result by node: .npz, .tsv or .csv"
    )
    parser.add_argument(
        "--picture", metavar="FILE", help=".png or .svg of steps and bandwidth"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no text")


def run(args: argparse.Namespace) -> int:
    """Read, traverse, print; 1 without convergence, 2 for what cannot work."""
    progress = _Progress()
    try:
        _check(args)
        begun = time.perf_counter()
        weighted = args.weighted or args.question == "sssp"
        found = read_graph(
            args.file,
            weighted=weighted,
            undirected=args.undirected,
            num_nodes=args.nodes,
            note=progress.note,
        )
        read_seconds = time.perf_counter() - begun
        placed = place(found.graph, args.device)
        trace = _Told(progress)
        begun = time.perf_counter()
        values = _answer(args, found, placed, trace)
        seconds = time.perf_counter() - begun
        progress.end()
        facts = {
            "question": args.question,
            "file": args.file,
            "device": str(placed.device),
            "num_nodes": found.graph.num_nodes,
            "num_edges": found.graph.num_edges,
            "read_seconds": read_seconds,
            **_facts(args.question, values, trace),
            "seconds": seconds,
            "bytes_read": trace.bytes_read,
            "steps": [vars(step) for step in trace.steps],
        }
        if args.out:
            write_result(args.out, found, values)
        if args.picture:
            draw(args.picture, facts)
    except (ValueError, OSError, RuntimeError) as error:
        progress.end()
        print(f"ssdtrain graph: {error}", file=sys.stderr)
        return 2
    print(json.dumps(facts) if args.json else "\n".join(_text(facts, args)))
    return int(facts.get("converged") is False)


def _check(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: options of another question, or files of no known kind.
    """
    paths, ranks = args.question in ("bfs", "sssp"), args.question == "pagerank"
    for name, fits in {
        "source": paths,
        "predecessors": paths,
        "weighted": ranks,
        "personalize": ranks,
        "damping": ranks,
        "tolerance": ranks,
        "max_iterations": ranks,
    }.items():
        if getattr(args, name) not in (None, False) and not fits:
            raise ValueError(f"--{name.replace('_', '-')} is not for {args.question}")
    if paths and args.source is None:
        raise ValueError(f"{args.question} expects --source NODE")
    if args.nodes is not None and args.nodes < 0:
        raise ValueError(f"--nodes: expects 0 or more, got {args.nodes}")
    for name, kinds in {"out": _WRITERS, "picture": (".png", ".svg")}.items():
        value = getattr(args, name)
        if value:
            _check_written(name, Path(value), kinds, Path(args.file))


def _check_written(name: str, path: Path, kinds: Collection[str], graph: Path) -> None:
    """
    Raises:
        ValueError: a file that cannot be written, or the graph itself. Said before the
            work, whose result would be lost.
    """
    if path.suffix not in kinds:
        raise ValueError(f"--{name}: expects {', '.join(kinds)}, got {str(path)!r}")
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
        raise ValueError(
            f"--{name}: expects a file in a directory that can be written to, got "
            f"{str(path)!r}"
        )
    if path.exists() and graph.exists() and path.samefile(graph):
        raise ValueError(f"--{name}: expects another file than the graph, got {path}")


def _answer(
    args: argparse.Namespace, found: GraphFile, placed: PlacedGraph, trace: Trace
) -> dict[str, torch.Tensor]:
    """The result by name."""
    if args.question == "components":
        nodes = connected_components(placed, trace=trace)
        return {"component": nodes}
    if args.question == "pagerank":
        start = None
        if args.personalize is not None:
            start = torch.zeros(placed.num_nodes, dtype=torch.float64, device="cpu")
            start[_nodes(found, "personalize", args.personalize)] = 1.0
        settings = {"damping": args.damping, "tolerance": args.tolerance}
        with warnings.catch_warnings():  # `trace.converged` is printed
            warnings.simplefilter("ignore", RuntimeWarning)
            rank = pagerank(
                placed,
                weighted=args.weighted,
                personalization=start,
                max_iterations=args.max_iterations,
                trace=trace,
                **{k: v for k, v in settings.items() if v is not None},
            )
        return {"rank": rank}
    sources = _nodes(found, "source", args.source)
    search = bfs if args.question == "bfs" else sssp
    result = search(placed, sources, trace=trace)
    values = {"level" if search is bfs else "distance": result}
    if args.predecessors:
        values["predecessor"] = predecessors(placed, sources, result, trace=trace)
    return values


def _nodes(found: GraphFile, option: str, text: str) -> list[int]:
    try:
        return found.nodes([name.strip() for name in text.split(",")])
    except ValueError as error:
        raise ValueError(f"--{option} {error}") from None


def _facts(
    question: str, values: dict[str, torch.Tensor], trace: Trace
) -> dict[str, Any]:
    """What is printed of a result besides its steps."""
    value = next(iter(values.values()))
    if question == "components":
        sizes = torch.bincount(value, minlength=1)
        return {
            "components": int((sizes > 0).sum()),
            "largest": int(sizes.max()),
        }
    if question == "pagerank":
        most = float(value.max()) if len(value) else 0.0
        return {"converged": trace.converged, "largest": most}
    reached = value >= 0
    if value.is_floating_point():
        reached &= value < torch.inf
    farthest = value[reached].max().item()
    return {"reached": int(reached.sum()), "farthest": farthest}


def _text(facts: dict[str, Any], args: argparse.Namespace) -> list[str]:
    steps, seconds = facts["steps"], facts["seconds"]
    said = {
        "bfs": "{reached:,} nodes reached, the farthest at level {farthest}",
        "sssp": "{reached:,} nodes reached, the farthest at {farthest:g}",
        "components": "{components:,} components, {largest:,} nodes in the largest",
        "pagerank": "converged: {converged}; the largest rank is {largest:.4g}",
    }[facts["question"]].format(**facts)
    walked = sum(step["walked_seconds"] for step in steps)
    rate = facts["bytes_read"] / walked / 1e9 if walked else 0.0
    lines = [
        f"graph      {facts['num_nodes']:,} nodes, {facts['num_edges']:,} edges, read "
        f"in {facts['read_seconds']:.2f} s",
        f"{facts['question']:<10} {said}",
        f"steps      {len(steps)} in {seconds:.3f} s on {facts['device']}; "
        f"{facts['bytes_read'] / 1e6:,.1f} MB of edges read at {rate:.2f} GB/s",
    ]
    for name in ("out", "picture"):
        if getattr(args, name):
            lines.append(f"{name:<10} {getattr(args, name)}")
    return lines


def write_result(path: str, found: GraphFile, values: dict[str, torch.Tensor]) -> None:
    """Write a row for each node; components and predecessors by their names."""
    names = found.names
    listed = names.tolist() if isinstance(names, torch.Tensor) else list(names)
    columns: dict[str, list[Any]] = {"node": listed}
    for name, tensor in values.items():
        column = tensor.tolist()
        if name in ("component", "predecessor"):
            nobody: Any = -1 if isinstance(names, torch.Tensor) else ""
            column = [nobody if node < 0 else listed[node] for node in column]
        columns[name] = column
    target = Path(path)
    # An earlier result stays until this one is whole.
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        _WRITERS[target.suffix](str(part), columns)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _write_npz(path: str, columns: dict[str, list[Any]]) -> None:
    arrays: dict[str, Any] = {}
    for name, column in columns.items():
        plain = all(isinstance(value, int | float) for value in column)
        arrays[name] = np.array(column if plain else [str(v) for v in column])
    np.savez(path, **arrays)


def _write_lines(path: str, columns: dict[str, list[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        delimiter = "," if path.endswith(".csv") else "\t"
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


_WRITERS = {".npz": _write_npz, ".tsv": _write_lines, ".csv": _write_lines}


def draw(path: str, facts: dict[str, Any]) -> None:
    """Draw what each step read, and how fast."""
    from matplotlib.figure import Figure

    steps = facts["steps"]
    figure = Figure(figsize=(7, 5), layout="tight")
    above, below = figure.subplots(2, 1, sharex=True)
    numbers = range(len(steps))
    above.bar(numbers, [step["num_nodes"] for step in steps], color="tab:blue")
    above.set_ylabel("nodes whose lists are read")
    above.set_yscale("symlog", linthresh=1)
    rates = [
        step["bytes_read"] / step["walked_seconds"] / 1e9
        if step["walked_seconds"]
        else 0.0
        for step in steps
    ]
    below.bar(numbers, rates, color="tab:orange")
    below.set_ylabel("GB/s of edges")
    below.set_xlabel("level" if facts["question"] == "bfs" else "step")
    above.set_title(
        f"{facts['question']} of {Path(facts['file']).name} on {facts['device']}"
    )
    figure.savefig(path)


class _Progress:
    """A line that changes on a terminal; elsewhere a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told = time.monotonic()
        self._width = 0

    def note(self, text: str) -> None:
        now = time.monotonic()
        if self._terminal:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif now - self._told >= _NOTE_SECONDS:
            print(f"ssdtrain graph: {text}", file=sys.stderr, flush=True)
            self._told = now

    def end(self) -> None:
        """Clear the line."""
        if self._terminal and self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
            self._width = 0


class _Told(Trace):
    """Tells of each step as it ends."""

    def __init__(self, progress: _Progress) -> None:
        super().__init__(timed=True)
        self._progress = progress

    def add(self, step: Step) -> None:
        """Take it, and tell."""
        super().add(step)
        rate = step.bytes_read / step.walked_seconds / 1e9 if step.walked_seconds else 0
        self._progress.note(
            f"step {len(self.steps)}: {step.num_nodes:,} nodes, {step.num_edges:,} "
            f"edges, {rate:.2f} GB/s"
        )
