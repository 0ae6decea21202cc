"""The pages of measured results and the README's headline, generated; never typed.

python -m recipes.bench.common.report             # print
python -m recipes.bench.common.report --write     # docs/results/ and the README's rows
python -m recipes.bench.common.report --check     # fail if one of them is out of date
python -m recipes.bench.common.report --pictures  # draw docs/img/results-*.svg
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from recipes.bench.common import seeds
from recipes.bench.common.cells import RESULTS, ROOT
from recipes.bench.common.headline import headline
from recipes.bench.common.pictures import PICTURES
from recipes.bench.common.results import Data, find
from recipes.bench.foresight.tables import steps
from recipes.bench.gather.tables import gather, one_call
from recipes.bench.gnn.tables import gnn, tiering
from recipes.bench.megatron.tables import megatron
from recipes.bench.models.gains import gains
from recipes.bench.models.limit_tables import fits, grid, lengths, predictions
from recipes.bench.models.tables import graphs, models, real_models
from recipes.bench.offload.tables import (
    host_actions,
    host_time,
    placement,
    recipes,
    rivals,
)
from recipes.bench.planner.tables import planner, rok
from recipes.bench.rgnn.tables import accuracy, batches, compilation, epochs, rgnn
from recipes.bench.safety.tables import (
    mutants,
    sanitize,
    searches,
    self_check,
    stale,
    survival,
    verify,
    zoo,
)
from recipes.bench.sampling.tables import sampling
from recipes.bench.storage.tables import gds, io, malloc_hook, soak
from recipes.bench.traversal.tables import compressed, traversal

DETAILS = (
    "<details markdown>\n<summary>All measured rows, older and partial ones as well"
    "</summary>\n\n{}\n\n</details>"
)
README = ROOT / "README.md"
DOCS = ROOT / "docs" / "results"
BEGIN, END = "<!-- headline: begin -->", "<!-- headline: end -->"
GENERATED = "<!-- Written by `python -m recipes.bench.common.report --write`. -->"

Table = Callable[[Path], str]
"""Builds its text from a folder of results; empty if nothing is recorded there."""


def of_file(name: str, build: Callable[[Data], str]) -> Table:
    """A table of one record."""

    def table(results: Path) -> str:
        data = find(results / f"{name}.json")
        return build(data) if data else ""

    return table


@dataclass(frozen=True)
class Page:
    """One page of docs/results.

    question: that it answers. tables: folder of the results, and the table.
    """

    title: str
    question: str
    tables: tuple[tuple[str, Table], ...]
    note: str = ""
    """What a reader has to know of how old or how partial the figures are."""
    opening: Table | None = None
    """The table that answers the question; all others are folded up then."""

    def text(self, name: str) -> str:
        """The page; empty if nothing is recorded for it."""
        found = [text for area, table in self.tables if (text := table(RESULTS / area))]
        if not found:
            return ""
        pictures = [
            f"![{picture.caption}](../img/{picture.file})\n\n*{picture.caption}*"
            for picture in PICTURES
            if picture.page == name and (ROOT / "docs/img" / picture.file).exists()
        ]
        parts = [GENERATED, f"# {self.title}", self.question]
        parts += filter(None, [self.opening and self.opening(RESULTS / "models")])
        tables = "\n\n".join(found)
        if self.opening is not None:
            tables = DETAILS.format(tables)
        parts += [*pictures, tables]
        if self.note:
            parts += ["## How it was measured", self.note]
        return "\n\n".join(parts) + "\n"


PAGES = {
    "real-models": Page(
        "Models as people train them",
        "Is it fast where it matters: stock models of transformers, next to "
        "checkpointing and the other ways to save memory?",
        (
            ("models", of_file("real_models", real_models)),
            ("models", of_file("real_models_h200_pair", real_models)),
            ("models", of_file("real_models_h200_pair_last", real_models)),
            ("models", of_file("real_models_h200_pair_later", real_models)),
            ("models", of_file("real_models_h200_alone", real_models)),
            ("models", of_file("real_models_h200_beside", real_models)),
            ("models", of_file("real_models_h200_beside_first", real_models)),
            ("models", of_file("real_models_h100_alone", real_models)),
            ("models", of_file("real_models_h100_two", real_models)),
            ("models", of_file("real_models_h100_host", real_models)),
            ("models", of_file("real_models_h100_host_second", real_models)),
            ("models", of_file("real_models_h100_host_third", real_models)),
            ("models", of_file("real_models_h100_third", real_models)),
            ("models", of_file("real_models_h100_two_later", real_models)),
            ("models", of_file("real_models_h100_pair", real_models)),
            ("models", of_file("real_models_h100", real_models)),
            ("models", of_file("fits", fits)),
            ("models", of_file("grid", grid)),
            ("models", of_file("grid_h100", grid)),
            ("models", of_file("lengths", lengths)),
            ("models", of_file("predictions", predictions)),
            ("models", of_file("predictions_h200", predictions)),
            ("models", models),
            ("models", of_file("graphs", graphs)),
            ("offload", of_file("host_time", host_time)),
            ("offload", of_file("host_actions_h100", host_actions)),
            ("offload", of_file("host_actions", host_actions)),
        ),
        "`fsdp2` are two GPUs, `fully_shard` by layer with fp32 masters; `tp` two with "
        "`parallelize_module` and sequence parallel norms, where DTensors are what "
        "autograd saves; `fsdp2-1` and `tp-1` are the same on a mesh of one rank, "
        "where no byte crosses a link between GPUs. A budget counts from the level at "
        "the root's forward, a peak here from the level before the step: under FSDP2 "
        "the root's gathered weights lie between them. The first table of one H100 and "
        "that of two are of later code than that of four, one row at a time; those of "
        "the second table of one H100 ran two at a time, on two GPUs of one host. "
        "The tables of two H200s (each row by itself on both GPUs), of the H200 with "
        "the 1.7B alone, and of those whose rows ran at the same time on two GPUs of "
        "one host are of 2026-11-27 and of later code than the others. The second "
        "of two H100s is of the last code, where steps tell what copies cost though no "
        "plain one fits; its 24 layers are of an hour before. The second of "
        "two H200s and the mixture of experts' are of the same day; the table with "
        "the 1.7B's `budget=1gc`, `tp`, and the host's time by action are of some "
        "hours before, when plans of ranks could not yet use what was left to "
        "predictions; `fsdp2` of the first is of before re-runs told what forwards "
        "take the host. The hosts of these machines differ more than the plans: that "
        "of the 1.7B alone took up to twice as long for a hook. "
        "The table of two H200s of 2026-11-28 is of later code than all of these, in "
        "which what recipes store has a row of its own. The three of 512 tokens are of "
        "three hosts: the default's plan keeps everything there and has no hooks, so "
        "what it takes over plain is the host's own unrest, most of it the third's, on "
        "which steps without hooks took 210 to 363 ms; the 1.7B of the same day ran "
        "there, where a tensor that is moved was priced at 402 and 669 microseconds. "
        "The host's time by action of that day was measured in two turns of 15 steps, "
        "by code without that row. "
        "All other rows are of code before "
        "hooks were priced dearer than their own time and copies were made in C; then "
        "an H100's host took 12.6, 187 and 351 microseconds for the three actions. "
        "Where one tensor a layer moves, most kept ones cost nothing: their figure is "
        "noise. Rows of "
        "four H100s ran four at a time, each on a GPU of one host, whose processor "
        "takes 190 microseconds for a tensor that is moved (last table); their reports "
        "show waits for it that no plan foresaw. On that host the 4B and the mixture "
        "of experts did not fit into 80 GB when everything was kept. Two of those "
        "rows, 4B `budget=2gc` and `fsdp2` `budget=1gc`, were timed while a step was "
        "observed again, which now takes more steps that are off. "
        "`verify=shadow` compares every byte of what is moved or rebuilt, here of all "
        "recipes that were admitted. "
        "Long steps of changing lengths are those before the first plan and the ones "
        "in which another plan is taken; in pass one lengths are new to the session, "
        "not to the device. An earlier run, on an H100 and next to another row, took "
        "1.079 times plain at a constant length, 1.096 times on drawn lengths and "
        "1.046 times on packed ones. Of the H100's predictions, 1.7B at 2k tokens, 4B "
        "at 4k and Mistral are of code before that of the others, with four timed "
        "steps; the H200's are of one run, next to three other GPUs of the host that "
        "were as busy. "
        "The H200's rows are of several runs, each with its own plain step: 1.7B and "
        "the 24 layers under `fsdp2` are of 2026-11-26, all others of 2026-11-23; "
        "checkpointing and `budget=1gc` of the 4B were runs of their own, next to "
        "those runs' plain steps. A plan that was not settled may have been changed, "
        "and one step be long, while its row was timed. Cells under `device_memory` on "
        "an H200 that their file calls run 1 "
        "are of the code before plans left pages free where segments grow. The three "
        "cells of 64k tokens that ended out of memory there did so in their first "
        "step, which had no error of its own then: the H100's table has them again. "
        "Two that were refused ended in their second step.",
        opening=gains,
    ),
    "placement": Page(
        "Where activations live",
        "What does each way to place activations cost, and what does it free?",
        (
            ("offload", of_file("placement", placement)),
            ("offload", rivals),
            ("offload", of_file("recipes", recipes)),
        ),
        "The rows `ours auto` of the first table are of back-pressure alone, before "
        "the planner.",
    ),
    "planner": Page(
        "The planner",
        "Does a plan do what it predicts, and is it the best one?",
        (("planner", planner), ("planner", rok)),
        "Measured before predicted peaks knew what the model's own frames hold: "
        "8192x4, 16384x2, 4096x8, the budgets and the curves over batch sizes; 6144x24 "
        "is of later code, with recipes of products and attention. Time is predicted "
        "less well than memory: at its power limit a device's clock depends on how "
        "much it waits ([what the planner does not know]"
        "(../planner.md#what-it-does-not-know)). Behind cuFile's compatibility mode "
        "plans cost more than through pinned memory (`gpu_direct: off`).",
    ),
    "foresight": Page(
        "Steps that nobody has run",
        "How close does [`ssdtrain foresight predict`](../foresight.md) come to steps "
        "and peaks that were measured only afterwards?",
        (("steps", steps),),
        "What the host binds, the first batch of each model, is as far off as the same "
        "host work differs from one second to the next on a machine where other "
        "processes run: [how well](../foresight.md#how-well).",
    ),
    "megatron": Page(
        "Megatron-Core on several GPUs",
        "Is it fast and right under tensor and pipeline parallelism?",
        (("megatron", megatron),),
        "Under tensor parallelism 60 % of the peak at 1 % overhead is just missed by "
        "GPT at 12288x3 and by T5 at the two narrower sizes, which had no turn with a "
        "budget; T5's pipeline is just above 2 %. `ours auto`, but for GPT at 16384x2, "
        "was measured before predicted peaks knew what the model's own frames hold.",
    ),
    "storage": Page(
        "The path to the SSD",
        "Is it as fast as the disk, and does anything grow?",
        (
            ("storage", of_file("io", io)),
            ("storage", of_file("gds", gds)),
            ("storage", of_file("malloc_hook", malloc_hook)),
            ("storage", of_file("soak_cpu", soak)),
        ),
    ),
    "safety": Page(
        "Is it right?",
        "Are gradients the plain run's to the last bit, and what does watching cost?",
        (
            ("safety", survival),
            ("safety", searches),
            ("safety", of_file("zoo_cpu", zoo)),
            ("safety", of_file("verify", verify)),
            ("safety", of_file("self_check", self_check)),
            ("safety", of_file("sanitize", sanitize)),
            ("safety", of_file("stale_graphs", stale)),
            ("safety", of_file("mutants", mutants)),
            ("safety", of_file("mutants_fresh", mutants)),
        ),
    ),
    "gather": Page(
        "Gathering rows of host memory",
        "How much of the link does `features[index]` reach?",
        (
            ("gather", of_file("one_call", one_call)),
            ("gather", of_file("one_call_h200", one_call)),
            ("gather", gather),
        ),
    ),
    "gnn": Page(
        "GNN training with features in host memory",
        "How much faster is an epoch?",
        (("gnn", gnn), ("gnn", tiering)),
        "Two GPUs were measured earlier than one, with 8 multiprocessors for gathering "
        "(16 are the default) and before every block of an ordered gather had its "
        "share of the host's rows: the rows of one GPU next to them are of that time.",
    ),
    "sampling": Page(
        "Neighbour sampling",
        "How many edges a second does the GPU draw, and what is an epoch worth?",
        (("sampling", sampling),),
    ),
    "traversal": Page(
        "Graph traversal out of memory",
        "How close to the link's speed are searches over edges in host memory?",
        (("traversal", traversal), ("traversal", compressed)),
        "On the H100 components looked for roots before they compared parents. Levels "
        "of graphs whose lists are a line or two long are bound by requests, not by "
        "bytes: docs/traversal.md says how.",
    ),
    "relational": Page(
        "Relational layers",
        "How fast are compiled layers, and do they train alike?",
        (
            ("rgnn", rgnn),
            ("rgnn", of_file("accuracy", accuracy)),
            ("rgnn", of_file("epochs", epochs)),
            ("rgnn", of_file("batches", batches)),
            ("rgnn", of_file("compile", compilation)),
        ),
        "The layers' own times next to their ablation are older than their last "
        "changes. Relational attention in bfloat16, trained on small graphs, is bound "
        "by the host.",
    ),
}


def rendered() -> dict[Path, str]:
    """Every generated page by its path, and the README with its headline."""
    texts = {name: page.text(name) for name, page in PAGES.items()}
    found = {DOCS / f"{name}.md": text for name, text in texts.items() if text}
    lines = [
        f"- [{PAGES[name].title}]({name}.md): {PAGES[name].question}"
        for name, text in texts.items()
        if text
    ]
    found[DOCS / "seeds.md"] = seeds.page(GENERATED)
    lines.append(f"- [{seeds.TITLE}](seeds.md): {seeds.QUESTION}")
    intro = (
        "Every figure here was measured by a script of `recipes/bench/` and is "
        "generated from the file that it wrote to `recipes/bench/results/`, which "
        "holds the device, all versions and the command line. "
        "[How to measure](../benchmarks.md)."
    )
    found[DOCS / "README.md"] = "\n\n".join(
        [GENERATED, "# Results", intro, "\n".join(lines) + "\n"]
    )
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    found[README] = f"{before}{BEGIN}\n{headline(RESULTS)}\n{END}{after}"
    return found


def stale() -> list[str]:
    """Pages that are not what the results say, and pages that nothing generates."""
    wanted = rendered()
    different = [
        str(path.relative_to(ROOT))
        for path, text in wanted.items()
        if not path.exists() or path.read_text() != text
    ]
    return different + [
        str(p.relative_to(ROOT)) for p in DOCS.glob("*") if p not in wanted
    ]


def main(argv: list[str] | None = None) -> None:
    """Print, write, check or draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pictures", action="store_true", help="needs matplotlib")
    options = parser.parse_args(argv)
    if options.pictures:
        for picture in PICTURES:
            picture.write(RESULTS, ROOT / "docs" / "img")
    if options.write:
        DOCS.mkdir(parents=True, exist_ok=True)
        for path, text in rendered().items():
            path.write_text(text)
    elif options.check:
        if found := stale():
            sys.exit(
                f"{found} are out of date; run "
                "python -m recipes.bench.common.report --write"
            )
    elif not options.pictures:
        print("\n\n".join(rendered().values()))


if __name__ == "__main__":
    main()
