"""The table of benchmarks: what each shows, and how long it takes."""

from typing import NamedTuple

from recipes.bench.harness.tables import Column, table


class Case(NamedTuple):
    """A benchmark: the module of this name below `recipes.bench`, and its `main`."""

    name: str
    budget_s: float = 600
    """Nothing is started after that, unless `--budget-s` says otherwise."""
    seconds: str = ""
    """On an H200, start included."""
    what: str = ""
    words: str = ""
    """Of a usual command."""
    file: str = ""
    """Of the results, where it is not that of the name."""

    @property
    def record(self) -> str:
        """Below `results/`, without `.json`."""
        return self.file or self.name.replace(".", "/", 1)


_CPUS = "; on CPUs"
_LIGER = "; needs `liger-kernel`, `peft`"

CASES = (
    Case(
        "models.fits_cells",
        *(225, "240"),
        "39 cells of `ssdtrain fits` (models of 10 to 28 GB, 4k to 16k tokens; plain, "
        "checkpointing, selective) against predictions that were committed before: "
        "errors of peak and step, order; `--predict` needs no GPU",
    ),
    Case("models.foretold", what="`ssdtrain fits` against all recorded rows" + _CPUS),
    Case(
        "models.unseen",
        *(3600, ""),
        "sixteen architectures that no plan was tuned for, in turns with the "
        "checkpointing that they come with",
    ),
    Case(
        "models.real_models",
        *(600, "600"),
        "Qwen3 and Mistral shapes of transformers, a mixture of experts, full and "
        "LoRA, 512 to 128k tokens, eager, compiled, FSDP2: keep, checkpointing (all, "
        "every second layer, selective), TRL, ours; `--names`, `--only PATTERN`, "
        "`--rows NAME`, `--share` for all GPUs at work; needs `liger-kernel`, `peft`, "
        "`trl`",
    ),
    Case(
        "models.fits",
        *(400, "400"),
        "twenty stock models of many architectures, in what checkpointing reserves and "
        "3 %: does anything end out of memory? All GPUs share the cases. `--cases`, "
        "`--columns`, `--beside`" + _LIGER,
    ),
    Case(
        "models.grid",
        *(100, "400"),
        '`device_memory="fit"` at 40, 60 and 80 GB, 8k to 64k tokens: within the '
        "limit, "
        "or refused before the second step? In four cells beside a grid of byte "
        "budgets. All GPUs share the cells. `--names`, `--grid`" + _LIGER,
        "--budget-s 400",
    ),
    Case(
        "models.lengths",
        *(110, "80"),
        "lengths that change from step to step, drawn and packed from documents (a "
        "JSON list of tokens, or a text): over plain, long steps, budget; needs "
        "`liger-kernel`",
        "--documents FILE",
    ),
    Case(
        "models.predictions",
        *(150, "150"),
        "sixty plans of ten models and lengths, predicted against measured: step, "
        "whole peak, budgets" + _LIGER,
    ),
    Case(
        "models.trl_steps",
        *(240, ""),
        "TRL's own GRPO and SFT trainers at checkpointing's memory: loss and backward, "
        "generation left out; needs `trl`, `peft`",
        "--case grpo",
    ),
    Case(
        "models.graphs",
        *(170, "150"),
        "a step captured into one CUDA graph, with and without ssdtrain in it; "
        "`--rows`",
    ),
    Case(
        "models.evaluation",
        *(600, "230"),
        "BERT, GPT, T5 at the evaluation's sizes, one with a vocabulary of 50k",
        "--budget-s 200",
        "models/models",
    ),
    Case(
        "offload.placement",
        *(600, "320"),
        "keep, offload, recompute, recipes, TRL, `save_on_cpu` on GPT blocks; "
        "`--rivals` (60 s a size) for DeepSpeed's, transformers' and the compiler's "
        "ways",
        "--budget-s 310",
    ),
    Case(
        "offload.deep_compile",
        *(240, "130"),
        "DeepSpeed DeepCompile's pass that offloads activations; builds its operator",
        "--budget-s 120",
    ),
    Case(
        "offload.recipes",
        *(500, "320"),
        "recipes alone: peak, step, share of bytes",
        "--budget-s 300",
    ),
    Case(
        "offload.recipe_kernels",
        *(25, "10"),
        "the kernels of recipes against torch's own: bytes and time",
    ),
    Case(
        "offload.host_actions",
        *(200, "200"),
        "(on an H100, twice what one of two rounds took) microseconds of host time of "
        "a kept, a moved and a rebuilt tensor of a stock model whose step the host "
        "bounds; of a moved one by hooks that check nothing, and by TRL's",
    ),
    Case(
        "planner.regret",
        *(250, "270"),
        '`plan="auto"` against all policies, predicted against measured, regret; each '
        "cell has its own limit, profiles are kept beside the results; 84 GB of GPU, "
        "50 GB pinned. `--only 'bandwidth/*' --directory SSD` (90 s): behind the disk, "
        "and behind main memory limited to 2 to 24 GB/s",
        file="planner/planner",
    ),
    Case(
        "planner.rok",
        *(150, "160"),
        "recompute, offload, keep over batch sizes (Wu, Figure 5.12)",
    ),
    Case("planner.project_device", 60, "60", "`project` against a GPU"),
    Case("planner.project_peers", what="`project` against LLMem and others" + _CPUS),
    Case("safety.verify", 45, "55", "what `verify` costs, plan by plan"),
    Case(
        "safety.self_check",
        *(100, "100"),
        "what the self-check and the proofs of recipes cost: twelve pairs of steps "
        "with and without",
        "--plans recipes --seconds 75",
    ),
    Case(
        "safety.survival",
        *(60, "25"),
        "programs that break offloading, against TRL and DeepSpeed",
    ),
    Case(
        "safety.sanitize",
        *(55, "60"),
        "torch's stream sanitizer over the law; compute-sanitizer over steps and "
        "gathers; waits planted out",
    ),
    Case(
        "safety.graphs",
        *(36_000, ""),
        "random graphs against plain autograd, byte for byte" + _CPUS,
        "--graphs 102000",
        "safety/graphs_cpu",
    ),
    Case(
        "safety.surprises",
        *(36_000, ""),
        "random models that change their ways after a plan was made" + _CPUS,
        file="safety/surprises_cpu",
    ),
    Case(
        "safety.opinfo",
        *(1200, ""),
        "torch's operator database" + _CPUS,
        file="safety/opinfo_cpu",
    ),
    Case(
        "safety.fault_soak",
        *(900, ""),
        "random faults" + _CPUS,
        "--steps 2500 --directory DIR",
        "safety/fault_soak_cpu",
    ),
    Case(
        "safety.damaged_files",
        *(3600, ""),
        "every file that is read, damaged: a clear error or a valid load" + _CPUS,
        "--files 10000",
    ),
    Case(
        "safety.zoo",
        *(4 * 3600, ""),
        "every model type of transformers, timm and diffusers, tiny, under imposed "
        "plans, in an environment of its own (see there)" + _CPUS,
        "--workers 2",
        "safety/zoo_cpu",
    ),
    Case(
        "safety.interrupts",
        *(3600, ""),
        "Ctrl-C at random moments" + _CPUS,
        "--signals 1000",
    ),
    Case(
        "safety.leaks",
        *(3600, ""),
        "resident memory over many steps" + _CPUS,
        "--steps 100000",
    ),
    Case(
        "safety.relational",
        *(36_000, "210"),
        "random relational graphs through hector's layers, with fresh, reused and "
        "changed tensors; also `--graphs 5000 --device cuda --budget-s 200`",
        "--graphs 100000",
    ),
    Case(
        "safety.graph_programs",
        *(36_000, ""),
        "random programs of graphs: hector's kept objects against fresh ones" + _CPUS,
        file="safety/graph_programs_cpu",
    ),
    Case(
        "safety.pyg_tests",
        *(300, ""),
        "PyG's own tests with our classes under PyG's names" + _CPUS,
        "--source DIR",
    ),
    Case(
        "safety.stale_graphs",
        *(60, "25"),
        "what it costs to notice changes of a graph's tensors behind PyTorch",
    ),
    Case(
        "storage.ssd",
        *(90, "60"),
        "the SSD path against a raw `O_DIRECT` loop",
        "--directory DIR --budget-s 60",
        "storage/io",
    ),
    Case(
        "storage.gds",
        *(300, "140"),
        "GPU to SSD on every path; `hook --budget-s 65` (70 s): the malloc hook in "
        "training",
        "--directory DIR --budget-s 130",
    ),
    Case("storage.soak", 600, "160", "does anything grow?", "--directory DIR --gb 200"),
    Case(
        "storage.direct",
        *(100, ""),
        "steps: one directory, two, tiered; staged and direct",
        "--directory DIR",
    ),
    Case("storage.numa", 100, "", "copies to each NUMA node from each GPU"),
    Case(
        "foresight.collect",
        *(60, "300"),
        "kernel times of a device, steps and host times; then `foresight.assemble` "
        "makes models of them, and `foresight.evaluate` predicts the steps",
        "kernels",
    ),
    Case("foresight.collectives", 60, "", "collectives and steps of several GPUs"),
    Case("foresight.held_ranks", what="those steps, predicted" + _CPUS),
    Case("foresight.assemble", what="device files of what was collected" + _CPUS),
    Case("foresight.evaluate", what="predicted against collected steps" + _CPUS),
    Case("foresight.host_left_out", what="what is left of the host's error" + _CPUS),
    Case("foresight.own_machine", 60, "", "this CPU learned, then predicted"),
    Case("foresight.plans", what="recorded plans with the clock modelled" + _CPUS),
    Case("foresight.sharded_host", what="what sharding costs the host" + _CPUS),
    Case("foresight.sharding", what="embedding tables over ranks" + _CPUS),
    Case("foresight.fusion", 120, "", "two convolutions in one kernel" + _CPUS),
    Case("foresight.tensor_ranks", what="split steps against their graphs" + _CPUS),
    Case("foresight.over_ranks", what="steps of two GPUs by two causes" + _CPUS),
    Case("foresight.by_data_sheet", what="a device by its data sheet alone" + _CPUS),
    Case("search.random_graphs", what="plans of operators against all plans" + _CPUS),
    Case("search.search_time", what="how long the search takes" + _CPUS),
    Case("search.intervals", what="descriptions against brute force" + _CPUS),
    Case("search.coverage", 300, "", "descriptions against DTensor" + _CPUS),
    Case("search.layouts", what="layouts of 8B and 70B" + _CPUS),
    Case("search.planned_ranks", what="planned programs on four ranks" + _CPUS),
    Case("search.launch_ranks", what="searched layouts on four ranks" + _CPUS),
    Case(
        "search.table_regret",
        *(580, ""),
        "embedding tables on two GPUs: 24 tasks, each under every rule's placement and "
        "twelve random ones; a rerun goes on",
    ),
    Case(
        "search.layout_regret",
        *(580, ""),
        "layouts of four models on two GPUs: predicted and measured step and peak, "
        "rank correlation, regret; a rerun goes on",
    ),
    Case(
        "megatron.core",
        *(270, "270"),
        "two GPUs, NCCL: law, tensor and pipeline parallel against Megatron's own "
        "ways; `--ranks 4`: the law alone",
        file="megatron/megatron",
    ),
    Case(
        "gather.sweep",
        *(200, "250"),
        "row gathers of host memory; 48 GiB managed, then 16 GiB pinned",
        "--budget-s 250",
        "gather/gather",
    ),
    Case(
        "gather.one_call",
        *(60, "75"),
        "`unified_table[index]`, one call and one wait: share of the DMA peak, of a "
        "burst, host time, the chooser's regret",
    ),
    Case(
        "gnn.tiering",
        *(60, "70"),
        "epochs with hot rows in GPU memory; on several GPUs under `torchrun -m "
        "recipes.bench gnn.tiering`",
    ),
    Case(
        "gnn.epochs",
        *(120, "120"),
        "GNN epochs with features in host memory (Min; Wu, Figure 4.8)",
        file="gnn/gnn",
    ),
    Case("sampling.rates", what="edges a second by who samples; epochs"),
    Case(
        "traversal.campaign",
        what="breadth-first search and more, out of memory",
        file="traversal/traversal",
    ),
    Case("rgnn.check", 100, "", "every generated kernel against an oracle"),
    Case(
        "rgnn.batches",
        *(90, "95"),
        "mini-batches, captured steps and the first call, against PyG's layers",
    ),
    Case(
        "rgnn.epochs",
        *(200, "220"),
        "mini-batch epochs with features in host memory, against PyG's loaders; "
        "`--anew` forgets earlier cells; PyG's side needs `pyg-lib` or `torch-sparse`",
    ),
    Case(
        "rgnn.accuracy",
        *(3600, "1300"),
        "CPU: accuracy of mini-batch against full-batch training, ten seeds; goes on "
        "where it stopped",
        "--data DIR --budget-s 7200",
    ),
    Case(
        "rgnn.layers",
        *(250, "250"),
        "relational layers against PyG; `--from FILE` goes on",
        file="rgnn/rgnn",
    ),
    Case("rgnn.fit", what="the cost model's constants, of these times" + _CPUS),
    Case(
        "rgnn.graphs",
        what="compaction ratios of real graphs" + _CPUS,
        words="--data DIR",
        file="rgnn/rgnn_graphs",
    ),
    Case(
        "rgnn.parity",
        what="same start, same losses as PyG" + _CPUS,
        words="--data DIR",
        file="rgnn/rgnn_parity",
    ),
    Case("rgnn.compile", 120, "", "what a first step compiles" + _CPUS),
    Case("rgnn.dgl", 110, "", "typed batches, DGL's blocks, second derivatives"),
    Case("rgnn.messages", 120, "", "message passing on graphs without types"),
    Case("rgnn.sweeps", 100, "", "the same over hidden sizes, nodes, density, width"),
    Case("rgnn.trees", 100, "", "a TreeLSTM on batched trees"),
    Case("rgnn.joined", 100, "", "an RGAT epoch by where features lie"),
)


def listed(*_: object) -> str:
    """The table for people."""
    columns: dict[str, Column] = {
        "name": lambda case: f"`{case.name} {case.words}".strip() + "`",
        "s": lambda case: case.seconds,
        "what": lambda case: case.what,
    }
    return table(CASES, columns, line="--")
