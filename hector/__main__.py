"""Command line: compile kernels ahead of their first use, and take them along.

    hector kernels make --arch 90 --layers rgat --widths 64 128 --out kernels.zip
    hector kernels pack --out kernels.zip      # what this machine compiled so far
    hector kernels add kernels.zip             # on the machine that is to find them
    hector kernels show kernels.zip

`make` needs no GPU. Kernels depend on a graph's sizes where schedules do: name the
published graphs that are like yours, or train once on your own and `pack`.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from hector.datasets.generate import TABLE_3_3, generate
from hector.graph import HeteroGraph
from hector.runtime.ahead import Target, compiling_for
from hector.runtime.bundle import BundleError, add, described, pack
from hector.sampling import NeighborSampler
from hector.train.config import LayerKind
from hector.train.model import LayerSpec, compiled_layer

NUM_SEEDS, FANOUTS = 1024, (15, 10)
"""Of the mini-batches that `--batches` compiles for."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: list[str] | None = None) -> int:
    """Run one command; 1 and a line on stderr where it cannot be done."""
    given = _parser().parse_args(argv)
    try:
        given.run(given)
    except BundleError as wrong:
        print(wrong, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        prog="hector", description=about[0], epilog=about[-1].strip()
    )
    kernels = parser.add_subparsers(required=True).add_parser(
        "kernels", help="compiled kernels that travel"
    )
    commands = kernels.add_subparsers(required=True)
    made = commands.add_parser("make", help="compile for a GPU that need not be here")
    made.add_argument("--arch", type=int, default=90, help="capability times ten")
    layers = [k.value for k in LayerKind]
    made.add_argument("--layers", nargs="+", choices=layers, default=layers)
    made.add_argument("--widths", nargs="+", type=int, default=[64], help="in and out")
    made.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    made.add_argument("--graphs", nargs="+", choices=TABLE_3_3, default=["aifb"])
    made.add_argument("--heads", type=int, default=1, help="of attention layers")
    made.add_argument("--tf32", action="store_true", help="products that may use TF32")
    made.add_argument("--batches", action="store_true", help="of sampled graphs too")
    made.add_argument("--out", type=Path, required=True)
    made.set_defaults(run=make)
    packed = commands.add_parser("pack", help="all that this machine compiled")
    packed.add_argument("--out", type=Path, required=True)
    packed.set_defaults(run=lambda given: _tell(pack(given.out), given.out))
    added = commands.add_parser("add", help="into this machine's cache")
    added.add_argument("bundle", type=Path)
    added.set_defaults(run=_add)
    shown = commands.add_parser("show", help="what a bundle holds")
    shown.add_argument("bundle", type=Path)
    shown.set_defaults(run=_show)
    return parser


def make(given: argparse.Namespace) -> None:
    """Compile forward and backward of every layer asked for, and pack the kernels."""
    torch.backends.cuda.matmul.allow_tf32 = given.tf32
    with compiling_for(given.arch) as target:
        for name in given.graphs:
            graph = generate(TABLE_3_3[name])
            for kind in map(LayerKind, given.layers):
                for width in given.widths:
                    for dtype in given.dtypes:
                        label = f"{name} {kind.value} {width} {dtype}"
                        spec = LayerSpec(
                            kind=kind,
                            in_channels=width,
                            out_channels=width,
                            heads=1 if kind is LayerKind.RGCN else given.heads,
                            num_bases=None,
                        )
                        _dry_run(spec, graph, DTYPES[dtype], label, target)
                        if given.batches:
                            label += " batches"
                            _dry_run(spec, _drawn(graph), DTYPES[dtype], label, target)
    _tell(pack(given.out, target.kernels), given.out)


def _dry_run(
    spec: LayerSpec,
    graph: HeteroGraph,
    dtype: torch.dtype,
    label: str,
    target: Target,
) -> None:
    """One training step and one without gradients."""
    before, begin = len(target.kernels), time.perf_counter()
    layer = compiled_layer(spec, graph).to(dtype)
    rows = torch.randn(graph.num_nodes, spec.in_channels, device="cpu").to(dtype)
    # A first layer's rows want no gradients, a later one's do.
    for first in (True, False):
        layer(rows.requires_grad_(not first), graph).sum().backward()
    with torch.no_grad():
        layer(rows, graph)
    found = len(target.kernels) - before
    print(f"{label}: {found} kernels, {time.perf_counter() - begin:.1f} s", flush=True)


def _drawn(graph: HeteroGraph) -> HeteroGraph:
    """A mini-batch's neighbourhood."""
    seeds = torch.randperm(graph.num_nodes, device="cpu")[:NUM_SEEDS]
    return NeighborSampler(graph, FANOUTS).sample(seeds).graph


def _tell(num_kernels: int, out: Path) -> None:
    size = out.stat().st_size / 1e6
    print(f"{num_kernels} kernels in {out}, {size:.1f} MB")


def _add(given: argparse.Namespace) -> None:
    found = add(given.bundle)
    print(
        f"{found.num_new} kernels added, {found.num_known} were there, "
        f"{found.num_schedules} schedules added"
    )


def _show(given: argparse.Namespace) -> None:
    found = described(given.bundle)
    print(f"Triton {found['triton']}, {len(found['kernels'])} kernels")
    for digest, name in sorted(found["kernels"].items(), key=lambda item: item[1]):
        print(f"{digest[:12]} {name}")


if __name__ == "__main__":
    sys.exit(main())
