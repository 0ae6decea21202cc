"""`ssdtrain project` beside llm-analysis (PyPI), on the same inputs.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install --no-deps llm-analysis==0.2.2
    /tmp/peer/bin/pip install fire
    python -m recipes.bench planner.project_peers --peer-python /tmp/peer/bin/python

The peer pins an old transformers, hence its own interpreter: this file runs itself
there to get the peer's figures. `adjusted` applies to the peer's bytes
the three differences that docs/project.md names; what remains is unexplained.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RECORD = ROOT / "recipes/bench/results/planner/project_peers.json"
PEER = "llm-analysis 0.2.2"


def inputs() -> list[dict[str, Any]]:
    """The cases as plain values, with our figures."""
    from ssdtrain.tools.project.assumptions import Assumptions
    from ssdtrain.tools.project.cases import CaseSet, cases
    from ssdtrain.tools.project.layer import operators, saved_bytes
    from ssdtrain.tools.project.model import layer_seconds

    assume = Assumptions()
    rows = []
    for case in (*cases(CaseSet.FIGURE_5_10), *cases(CaseSet.TABLE_5_4)):
        model, gpu, split = case.model, case.gpu, case.split()
        rows.append(
            {
                "name": case.name,
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "sequence": model.sequence,
                "vocabulary": model.vocabulary,
                "micro_batch": case.micro_batch,
                "tensor": case.tensor,
                "pipeline": case.pipeline,
                "sequence_tensor": split.outer,
                "tflops": case.tflops,
                "peak_tflops": gpu.tflops,
                "memory_gb": gpu.memory_gb,
                "memory_gb_per_s": gpu.memory_gb_per_s,
                "memory_efficiency": assume.memory_efficiency,
                "ours": {
                    "parameters": model.parameters,
                    "layer_flops": case.tensor
                    * sum(op.flops for op in operators(model, split)),
                    "layer_saved_bytes": saved_bytes(model, split),
                    "layer_seconds": layer_seconds(case, assume),
                },
            }
        )
    return rows


def ask_peer(row: dict[str, Any]) -> dict[str, float]:
    """The peer's figures for one row; runs under the peer's interpreter."""
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import GPUConfig, ModelConfig, ParallelismConfig

    analysis = LLMAnalysis(
        ModelConfig(
            name=row["name"],
            num_layers=row["layers"],
            n_head=row["heads"],
            hidden_dim=row["hidden"],
            vocab_size=row["vocabulary"],
            max_seq_len=row["sequence"],
        ),
        GPUConfig(
            name="ours",
            mem_per_GPU_in_GB=row["memory_gb"],
            hbm_bandwidth_in_GB_per_sec=row["memory_gb_per_s"],
            intra_node_bandwidth_in_GB_per_sec=1e9,
            intra_node_min_message_latency=0.0,
            peak_fp16_TFLOPS=row["peak_tflops"],
        ),
        parallelism_config=ParallelismConfig(
            tp_size=row["tensor"],
            pp_size=row["pipeline"],
            sp_size=row["sequence_tensor"],
        ),
        achieved_tflops=row["tflops"],
        hbm_memory_efficiency=row["memory_efficiency"],
    )
    size = (row["micro_batch"], row["sequence"])
    none = ActivationRecomputation.NONE
    saved = analysis.get_activation_memory_per_layer(*size, False, none)
    seconds, _ = analysis.get_latency_fwd_per_layer(*size, False, none)
    return {
        "parameters": analysis.total_num_params,
        "layer_flops": analysis.get_num_flops_fwd_per_layer(*size),
        "layer_saved_bytes": saved,
        "layer_seconds": seconds,
    }


def adjust(row: dict[str, Any], peer_bytes: float) -> float:
    """The peer's bytes after the three named differences."""
    tokens = row["micro_batch"] * row["sequence"]
    wide = tokens * row["hidden"] / row["sequence_tensor"]
    inner = tokens * row["hidden"] / row["tensor"]
    norms_in_16_bits = -2 * 2 * wide
    mlp_dropout_mask = wide
    attention_output_once = -4 * inner
    log_sum_exp_once = -4 * tokens * row["heads"] / row["tensor"]
    norm_statistics = 2 * 2 * 4 * tokens / row["sequence_tensor"]
    return (
        peer_bytes
        + norms_in_16_bits
        + mlp_dropout_mask
        + attention_output_once
        + log_sum_exp_once
        + norm_statistics
    )


def compare(peer_python: str) -> dict[str, Any]:
    """Run the peer and put both beside each other, by case."""
    rows = inputs()
    done = subprocess.run(
        [peer_python, "-m", "recipes.bench.planner.project_peers"],
        cwd=ROOT,
        input=json.dumps(rows),
        capture_output=True,
        text=True,
        check=True,
    )
    # The peer's logger writes to the same stream; the answer is the last line.
    for row, theirs in zip(rows, json.loads(done.stdout.splitlines()[-1]), strict=True):
        row["theirs"] = theirs
        row["adjusted_saved_bytes"] = adjust(row, theirs["layer_saved_bytes"])
    return {row["name"]: row for row in rows}


def markdown(record: dict[str, Any]) -> str:
    """The table of docs/project.md: ratios of the peer's figures to ours."""
    head = "| case | parameters | FLOPs | saved bytes | adjusted | forward time |"
    lines = [head, "|--" * 6 + "|"]
    for row in record["cells"].values():
        ours, theirs = row["ours"], row["theirs"]
        ratios = [theirs[key] / ours[key] for key in ours]
        ratios.insert(3, row["adjusted_saved_bytes"] / ours["layer_saved_bytes"])
        lines.append(
            f"| {row['name']} | " + " | ".join(f"{r:.3f}" for r in ratios) + " |"
        )
    return "\n".join(lines)


def main(*, out: Path = RECORD, peer_python: str = sys.executable) -> None:
    """Compare."""
    from recipes.bench.harness.cells import Cells

    cells = Cells(out, 600, {"peer": PEER}, anew=True)
    cells.data["cells"] = compare(peer_python)
    cells.save()
    print(markdown(cells.data))


if __name__ == "__main__":  # under the peer's Python, which has no torch
    print(json.dumps([ask_peer(row) for row in json.load(sys.stdin)]))
