"""Every table and figure of the four dissertations in a row: command, ours, theirs.

What is measured stands on the pages that the rows link to, with device and versions; a
row without a command says why there is none.
"""

from typing import NamedTuple

TITLE = "The dissertations' tables and figures"
QUESTION = "Which of them are reproduced, by which command, and which are not?"


class Row(NamedTuple):
    """One table or figure, or some that belong together."""

    what: str
    shows: str
    command: str
    """Of the checkout; empty: not reproduced."""
    ours: str
    """What it found, or why there is nothing."""
    theirs: str


def _bench(name: str) -> str:
    return f"python -m recipes.bench.{name}"


_DIAGRAM = "designs and settings, nothing to measure"
_PROJECT = "[project](../project.md)"
_RELATIONAL = "[relational](relational.md)"
_TRAVERSAL = "[traversal](traversal.md)"
_GATHER = "[gather](gather.md)"
_GNN = "[gnn](gnn.md)"
_FORESIGHT = "[foresight](../foresight.md#how-well)"
_MESSAGES = "[message passing](../message-passing.md#measured)"
_NO_TOFU = "Tofu's partitioning is not part of ssdtrain"
_LOST = "bars alone, no numbers in the text"

WU = (
    Row(
        "Fig. 1.1 to 1.3, 5.1, 5.3, 5.4",
        "trends of GPUs, SSDs, memory",
        "",
        "surveys of products; data that we do not have",
        "-",
    ),
    Row(
        "Fig. 2.1 to 2.4, 3.1, 3.2, 3.4 to 3.8, 4.1, 4.2, 4.4, 5.5 to 5.7, 5.9; "
        "Tables 3.1, 3.2, 3.6, 4.1, 4.2, 4.4, 5.2, 5.3, 6.1",
        "designs, APIs, systems",
        "",
        _DIAGRAM,
        "-",
    ),
    Row(
        "Fig. 3.3",
        "where inference time goes",
        _bench("rgnn.layers"),
        f"microseconds by part, ours and PyG's, on {_RELATIONAL}; Graphiler was not run",
        _LOST,
    ),
    Row(
        "Fig. 3.9, Table 3.4",
        "speed-up over the best other system",
        _bench("rgnn.layers"),
        f"training 13.1 (RGCN, float32), by model on {_RELATIONAL}; "
        "beside PyG and grouped products: DGL, Seastar, Graphiler and HGL were not run",
        "training 2.76, 11.3, 8.02 (RGCN, RGAT, HGT)",
    ),
    Row(
        "Table 3.3",
        "eight graphs",
        "ssdtrain train gnn=rgat trainer.data.name=mag",
        "generated at the same sizes; AIFB, MUTAG, FB15k-237 and a part of ogbn-mag from "
        "files as well",
        "-",
    ),
    Row(
        "Table 3.5",
        "compaction and reordering",
        _bench("rgnn.layers"),
        f"the ablation of {_RELATIONAL}",
        "best fixed choice within 1.02 to 1.33",
    ),
    Row(
        "Fig. 3.10",
        "memory of HGT by compaction ratio",
        _bench("rgnn.layers"),
        f"the memory picture of {_RELATIONAL}",
        _LOST,
    ),
    Row(
        "Fig. 3.11",
        "RGAT's kernels with C, R and neither",
        _bench("rgnn.layers") + " --phases kernels --graphs am fb15k",
        f"all four settings, on {_RELATIONAL} once they are measured: the record is of the chosen one alone",
        _LOST,
    ),
    Row(
        "Fig. 3.12",
        "widths 32, 64, 128",
        _bench("rgnn.layers"),
        f"twice the width costs less than twice in 60 of 64 steps ({_RELATIONAL})",
        _LOST,
    ),
    Row(
        "Fig. 3.13",
        "IPC and throughput of kernels",
        _bench("rgnn.layers") + " --phases kernels",
        "GB/s and TFLOP/s; no instructions per cycle: no counters were read",
        "traversal bound by latency",
    ),
    Row(
        "Fig. 4.3",
        "processors in CNN and GNN training",
        _bench("gnn.epochs"),
        f"GNN alone: 989 % of a core for PyG's way, 355 % for ours ({_GNN})",
        _LOST,
    ),
    Row(
        "Table 4.3",
        "six data sets",
        _bench("gnn.epochs"),
        "statistics of ogbn-products and wider features, generated; the others' files "
        "are not at hand",
        "-",
    ),
    Row(
        "Fig. 4.6",
        "random rows of host memory",
        _bench("gather.sweep"),
        f"2.07 to 7.85 times CPU gather and copy, rows of 256 B and more ({_GATHER})",
        "transfer time cut by 47.1 %",
    ),
    Row(
        "Fig. 4.7",
        "rows that do not start on lines",
        _bench("gather.sweep"),
        f"2,048 to 2,076 B: 0.90 of the peak at least ({_GATHER})",
        "1.95 times at 2,052 B, 1.17 without the shift",
    ),
    Row(
        "Fig. 4.8",
        "epochs of GraphSAGE and GAT",
        _bench("gnn.epochs"),
        f"2.64 to 6.53 times PyG's way ({_GNN})",
        "1.01 to 1.45 times DGL",
    ),
    Row(
        "Table 5.1, Fig. 5.10, 5.13",
        "endurance, bandwidth, lifespan",
        "ssdtrain project",
        f"the twelve systems on {_PROJECT}",
        "over 2 years in Fig. 5.13",
    ),
    Row(
        "Fig. 5.8",
        "memory of one step",
        "ssdtrain report latest",
        "the memory curve of every run of `ssdtrain train`",
        "25 % less peak",
    ),
    Row(
        "Fig. 5.11",
        "step and memory of BERT, GPT, T5",
        _bench("models.evaluation"),
        "on [real models](real-models.md); two ranks on [Megatron](megatron.md)",
        "28 to 40 % less memory at no cost",
    ),
    Row(
        "Fig. 5.12",
        "recompute, offload, keep",
        "ssdtrain rok --model gpt",
        "curves on [planner](planner.md)",
        _LOST,
    ),
    Row(
        "Table 5.4",
        "offloaded bytes, estimate, bandwidth",
        _bench("megatron.core"),
        "11.26, 12.76, 11.51 GiB; estimates within 2.3 to 4.5 % on "
        "[Megatron](megatron.md)",
        "10.37, 12.85, 10.75 GB (11.13, 12.60, 11.50)",
    ),
    Row(
        "Table 5.5",
        "scaled up to 64 GPUs",
        "ssdtrain project --cases table-5.5",
        _PROJECT,
        "less than Table 5.4 everywhere",
    ),
    Row(
        "Table 5.6",
        "throughput by batch size",
        _bench("planner.rok"),
        "on [planner](planner.md)",
        "27.6 to 71.8 % over batch 1",
    ),
)
MIN = (
    Row(
        "Fig. 2.1 to 2.5, 3.1 to 3.5, 3.7 to 3.9, 4.1 to 4.7; Tables 2.1, 3.1 to 3.3",
        "designs and systems",
        "",
        f"{_DIAGRAM}; the FPGA of Fig. 2.2 to 2.5 is replaced "
        "by a model of requests (`pydirect.coalesce`)",
        "-",
    ),
    Row(
        "Fig. 2.6, 2.8",
        "requests by size and walk",
        _bench("traversal.campaign"),
        "`pydirect.traversal.count_requests`: 39 and 49 % whole lines on GAP-urand, as "
        "printed; not compared with a GPU's counters",
        "39 and 49 % of whole lines",
    ),
    Row(
        "Fig. 2.7, Table 2.2",
        "six graphs",
        _bench("traversal.campaign"),
        "generated with their mean degrees and a fraction of the nodes",
        "-",
    ),
    Row(
        "Fig. 2.9 to 2.11",
        "bandwidth and amplification of BFS",
        _bench("traversal.campaign"),
        f"0.89 to 0.92 of the peak, 1.00 to 1.07 ({_TRAVERSAL})",
        "90 % of the peak, amplification 1.31 at most",
    ),
    Row(
        "Fig. 2.12",
        "four traversals against UVM",
        _bench("traversal.campaign"),
        f"6.4 to 15.9 times a page cache in software ({_TRAVERSAL}); UVM itself can hang "
        "a machine that it oversubscribes",
        "2.60 and 2.93 times UVM (both are printed)",
    ),
    Row(
        "Fig. 2.13",
        "ids of 4 and 8 bytes",
        _bench("traversal.campaign"),
        f"rows `4 B` and `8 B` of {_TRAVERSAL}",
        "1.57 times",
    ),
    Row("Fig. 2.14", "PCIe 3 and 4", "", "one link a machine", "1.88 times (UVM 1.53)"),
    Row("Table 2.3", "HALO", "", "its code is not public", "1.34 to 3.19 times"),
    Row(
        "Table 2.4",
        "Subway",
        _bench("traversal.campaign"),
        f"5.5 to 31.1 times a copy of subgraphs of our own ({_TRAVERSAL})",
        "2.14 to 4.14 times",
    ),
    Row("Table 3.4", "data sets", "", "generated, see Table 4.3 above", "-"),
    Row(
        "Fig. 3.6, 3.11, 3.12",
        "sharing the GPU with training",
        _bench("gather.sharing"),
        f"2 to 32 multiprocessors beside matrix products ({_GATHER}); threads in one "
        "process, no MPS",
        "10 % of the GPU suffices",
    ),
    Row(
        "Fig. 3.10, 3.13, 3.15",
        "row sizes, vector loads",
        _bench("gather.sweep"),
        _GATHER,
        "95.1 % of the link",
    ),
    Row(
        "Fig. 3.14",
        "training, one GPU and two",
        _bench("gnn.epochs"),
        f"one GPU on {_GNN}; two in tiering",
        "16 to 92 % faster",
    ),
    Row(
        "Fig. 4.8, 4.10, Table 4.1",
        "hot rows by score",
        _bench("gnn.tiering"),
        f"hit ratios on {_GNN}, one generated graph; MAG240M and papers100M are not at "
        "hand",
        _LOST,
    ),
    Row(
        "Fig. 4.9, 4.11, 4.12",
        "epochs with tiers, one to four GPUs",
        _bench("gnn.tiering"),
        f"one and two GPUs on {_GNN}; four were not measured",
        _LOST,
    ),
)
WANG = (
    Row("Fig. 1.1, 1.2, 2.1, 2.2, 4.1 to 4.3", "designs", "", _DIAGRAM, "-"),
    Row("Fig. 3.1 to 3.7", "Tofu's language, analysis, recursion", "", _NO_TOFU, "-"),
    Row("Table 3.1", "time to search", "", _NO_TOFU, "8.3 and 66.6 s"),
    Row("Table 3.2", "weights of the models", "", _NO_TOFU, "4.2 to 65.1 GB"),
    Row(
        "Fig. 3.8 to 3.11, Table 3.3",
        "throughput of partitioned models",
        "",
        _NO_TOFU,
        "60 to 98 % of ideal",
    ),
    Row(
        "Table 4.1",
        "what systems can express",
        "",
        "all rows of DGL but `send` and `recv` apart: [message passing]"
        "(../message-passing.md)",
        "-",
    ),
    Row(
        "Table 4.2",
        "GCN and GAT on five graphs",
        _bench("rgnn.messages"),
        f"times and memory on {_MESSAGES}; Reddit with a fifth of its edges; accuracy of "
        "relational models alone",
        "3.1 times PyG on Reddit-S",
    ),
    Row(
        "Fig. 4.4",
        "hidden sizes on PubMed",
        _bench("rgnn.sweeps") + " --sweeps hidden",
        "written and tried on a CPU, not measured yet",
        _LOST,
    ),
    Row(
        "Fig. 4.5 to 4.7",
        "Erdos-Renyi graphs: nodes, density, width",
        _bench("rgnn.sweeps"),
        f"written and tried on a CPU, not measured yet; graphs with power laws at published sizes on {_MESSAGES}",
        "3.4, 7.5 and 4.3 times PyG",
    ),
    Row(
        "Fig. 4.8",
        "TreeLSTM, batched",
        _bench("rgnn.trees"),
        f"5.4 times the levels in PyTorch ({_MESSAGES}); random trees, DyNet was not run",
        "10.67 times DyNet",
    ),
)
LIN = (
    Row(
        "Fig. 2.1, 3.1 to 3.3, 4.2 to 4.4, 4.6, 4.11, 5.1, 5.4, 5.7, 5.8, 6.1; Tables 3.2, "
        "4.1 to 4.3, 5.3",
        "designs and settings",
        "",
        _DIAGRAM,
        "-",
    ),
    Row(
        "Fig. 3.4, 3.5, Table 3.1",
        "fused convolutions",
        _bench("foresight.fusion"),
        "no fused kernel: strips in PyTorch, 3 of 33 pairs faster; the rule is no guide "
        "([foresight](../foresight.md#two-convolutions-in-one-kernel))",
        "1.09 times TVM, 2.09 times PyTorch",
    ),
    Row(
        "Fig. 4.1, 4.5, 5.2",
        "where step time goes",
        "ssdtrain foresight predict",
        "by family of kernels, for every step",
        _LOST,
    ),
    Row(
        "Fig. 4.7, 4.8",
        "host overheads T1 to T5",
        _bench("foresight.collect"),
        "of the recorded machines in their device files; means, no bars",
        _LOST,
    ),
    Row(
        "Fig. 4.9, 4.10, Table 4.4",
        "whole steps",
        _bench("foresight.evaluate"),
        "1.4 to 8.7 % by machine and shapes ([steps](foresight.md))",
        "7.96 % (4.61 % active)",
    ),
    Row(
        "Table 4.5",
        "kernels",
        _bench("foresight.collect"),
        f"by family on {_FORESIGHT}; convolutions 20 and 26 %",
        "under 10 % mostly",
    ),
    Row(
        "Fig. 5.3, 5.5",
        "look-ups of DLRM's data",
        "",
        "its data are not at hand; `foresight.reuse` makes the 17 bins",
        "-",
    ),
    Row(
        "Fig. 5.6, 5.9, Table 5.1",
        "collectives and look-ups",
        _bench("foresight.collectives"),
        f"on {_FORESIGHT}; one host, other kernels than FBGEMM's",
        "2.9 to 6.4 %",
    ),
    Row(
        "Fig. 5.10, 5.11, Table 5.2",
        "steps of several GPUs",
        _bench("foresight.over_ranks"),
        f"on {_FORESIGHT}; two and four H100 or H200",
        "5.21 % (DLRM), 3.00 % (language)",
    ),
    Row(
        "Table 5.4",
        "tables dealt out to ranks",
        _bench("foresight.sharding"),
        "on simulated machines: no sharded DLRM is trained",
        "17 of 20 within 10 %",
    ),
)
PARTS = (
    ("Wu: Hector, PyTorch-Direct, SSDTrain", WU),
    ("Min: zero-copy access", MIN),
    ("Wang: Tofu and DGL", WANG),
    ("Lin: performance models", LIN),
)


def page(generated: str) -> str:
    """Return the page; `generated`: its first line."""
    intro = (
        "*Ours* is what the command finds, or why there is none; devices, versions and "
        "older figures stand on the linked pages. *Theirs* is what the text prints: "
        "values of bars are lost. Ratios are not comparable where the other side differs."
    )
    parts = [generated, f"# {TITLE}", QUESTION, intro]
    for title, rows in PARTS:
        lines = ["| | shows | command | ours | theirs |", "|--|--|--|--|--|"]
        for row in rows:
            command = f"`{row.command}`" if row.command else "-"
            lines.append(
                f"| {row.what} | {row.shows} | {command} | {row.ours} | {row.theirs} |"
            )
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"
