"""The tables of the placement benchmarks, from their results."""

from pathlib import Path

from recipes.bench.common.results import Data, find
from recipes.bench.common.text import markdown, where
from recipes.bench.models.tables import rows_of, shown


def placement(data: Data) -> str:
    """Step ratio and activation peak of every way to place activations."""
    cells = data["cells"]
    sizes = list(dict.fromkeys(n.split("/")[0] for n in cells if "/" in n))
    columns = list(dict.fromkeys(n.split("/")[1] for n in cells if "/" in n))
    rows = []
    for column in columns:
        row = [column]
        for size in sizes:
            cell = cells.get(f"{size}/{column}", {})
            if "step_ratio" in cell:
                row.append(f"{cell['step_ratio']:.3f}x, {cell['peak_gb']:.2f} GB")
            else:
                row.append(cell.get("error", "-")[:40])
        rows.append(row)
    link = cells["link"]
    text = (
        "**Activation placement.** GPT blocks (hidden x layers), bf16, batch "
        f"{data['settings']['batch']}, sequence {data['settings']['sequence']}: step "
        "time over `keep`, and activation peak over forward and backward. `keep` is "
        "plain PyTorch; `trl` is TRL's OffloadActivations; every column ran in one "
        "process, and all losses were equal to the last bit: "
        f"{all(c['losses_equal'] for c in cells.values() if 'losses_equal' in c)}. "
        f"Link: {link['d2h_gb_per_s']:.1f} GB/s out, {link['h2d_gb_per_s']:.1f} in."
    )
    return f"{text}\n\n{markdown(['', *sizes], rows)}\n\n{where(data)}"


def recipes(data: Data) -> str:
    """What recipes save and cost on GPT blocks, and their share of a model's bytes."""
    cells = data["cells"]
    rows = [
        [
            f"{size}, {name}",
            f"{cell[name]['step_ratio']:.4f}x",
            f"{cell[name]['peak_gb']:.2f}",
            f"{cell[name]['peak_gone']:.1%}",
            f"{cell[name]['share']:.1%}",
        ]
        for size, cell in cells.items()
        if "keep" in cell
        for name in ("recipes", "no limit")  # the second is of older records
        if name in cell
    ]
    shares = [
        [name, f"{cell['share']:.1%}", "yes" if cell["bitwise_equal"] else "NO"]
        for name, cell in cells.items()
        if "bitwise_equal_offloading" in cell
    ]
    head = ["", "step / keep", "peak GB", "peak gone", "of saved bytes rebuilt"]
    text = (
        "**Recipes alone** (nothing offloaded). GPT blocks, hidden x layers @ batch x "
        "sequence, bf16: `recipes` holds to the default `max_overhead` of 1 %, `no "
        "limit` takes every recipe."
    )
    parts = [text, markdown(head, rows)]
    if shares:
        parts.append("The models of transformers, every recipe taken.")
        parts.append(markdown(["", "of saved bytes rebuilt", "bitwise equal"], shares))
    return "\n\n".join([*parts, where(data)])


def host_time(data: Data) -> str:
    """What a session costs the host."""
    plain, size = data["cells"]["plain"], data["settings"]["size"]
    rows = [
        [
            name,
            f"{cell['host_ms']:.1f} ({cell['least_ms']:.1f})",
            f"{cell['us_per_saved']:.0f} ({cell['least_us']:.0f})",
        ]
        for name, cell in data["cells"].items()
        if "us_per_saved" in cell
    ]
    text = (
        "**Host time** until forward and backward are enqueued, GPT blocks "
        f"{size['hidden']}x{size['num_layers']}, batch {size['batch']}, "
        f"{plain['num_saved']} saved tensors: median and least of "
        f"{data['settings']['steps']} steps; plain PyTorch {plain['host_ms']:.1f} "
        f"({plain['least_ms']:.1f}) ms."
    )
    head = ["", "ms a step", "microseconds a saved tensor, over plain"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def host_actions(data: Data) -> str:
    """What a kept, a moved and a rebuilt tensor cost the host."""
    cells = {name: cell for name, cell in data["cells"].items() if "kept_us" in cell}
    beside = [
        (each, title)
        for each, title in (("bare", "moved, bare hooks"), ("trl", "moved, TRL"))
        if any(each in cell for cell in cells.values())
    ]
    rows = [
        [
            name.removesuffix("/ours"),
            *(f"{cell[each]:.0f}" for each in ("kept_us", "moved_us", "rebuilt_us")),
            *(f"{cell[each]['moved_us']:.0f}" for each, _ in beside if each in cell),
            f"{cell['plain']['host_least_ms']:.1f}",
        ]
        for name, cell in cells.items()
    ]
    text = (
        "**Host time by action**, stock models: microseconds of a tensor, pack and use "
        f"together, from the least of {data['settings']['steps']} steps under each of "
        "three plans."
    )
    if beside:
        text += " Bare hooks make the same copies and check nothing."
    head = ["", "kept, or a parameter", "moved", "rebuilt"]
    head += [*(title for _, title in beside), "plain step, ms"]
    return f"{text}\n\n{markdown(head, rows)}\n\n{where(data)}"


def rivals(results_dir: Path) -> str:
    """Other people's ways beside ours; empty when rivals.json is missing."""
    data = find(results_dir / "rivals.json")
    if data is None:
        return ""
    rows = rows_of(data)
    columns = list(dict.fromkeys(c for cells in rows.values() for c in cells))
    body = [[c, *(shown(cells.get(c)) for cells in rows.values())] for c in columns]
    failed = [
        f"{name.split('/', 1)[1]} ({cell['error'][:60]})"
        for name, cell in data["cells"].items()
        if "error" in cell
    ]
    text = (
        "**Beside others**, GPT blocks as in the first table, one process. "
        "`transformers offload=True` and `deepspeed hidden states` recompute every "
        "layer and move its input; `compiled` is `torch.compile`, with "
        "`activation_memory_budget` where a budget is named: fused kernels round "
        "differently and are faster by themselves, so compare them with `compiled`."
    )
    text += f" Did not run: {', '.join(failed)}." if failed else ""
    parts = [text, markdown(["", *rows], body), deep_compile(results_dir), where(data)]
    return "\n\n".join(filter(None, parts))


def deep_compile(results_dir: Path) -> str:
    """DeepSpeed's compiler pass, in a sentence; empty when it was not measured."""
    data = find(results_dir / "deep_compile.json")
    if data is None:
        return ""
    settings = data["settings"]
    columns = [
        f"{name} {cell['forward_backward_ms']:.0f} ms, {cell['peak_gb']:.2f} GB"
        if "peak_gb" in cell
        else f"{name} did not run ({cell['error'][:80]})"
        for name, cell in data["cells"].items()
    ]
    return (
        f"DeepCompile on the blocks of {settings['size']}, one rank under ZeRO-3, "
        "forward and backward of the engine, told to use "
        f"{settings['memory_gb']:.0f} GB: {'; '.join(columns)}."
    )
