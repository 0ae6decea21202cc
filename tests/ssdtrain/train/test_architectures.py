"""`transformers.Trainer` on ten architectures: losses and weights are equal bit by bit.

With accumulation and evaluation, under a plan that moves and rebuilds all it can, and
under one that is searched for; with checkpointing as well, and with LoRA.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ssdtrain
from recipes.bench.models import unseen
from recipes.bench.models.stock import STOCK, with_lora
from tests.ssdtrain.bits import same_bits

pytest.importorskip("accelerate")

CASES = (
    *("llama-1b", "qwen3-1.7b", "mistral-7b/lora", "gemma2", "phi3", "olmo2-7b"),
    *("moe", "neox", "bert", "t5", "vit"),
)
CHECKPOINTED = ("llama-1b", "mistral-7b/lora", "moe", "t5", "vit")
"""Of all others, checkpointing wraps the same layers of the same library."""
KNOWN = {name: case.stock for name, case in unseen.CASES.items()} | STOCK
MOVES: dict[str, Any] = {
    "plan": "offload-all",
    "recompute": "full",
    "window_bytes": 1,
    "min_bytes": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "moved and rebuilt": MOVES,
    "planned": {"max_overhead": 1.0, "min_bytes": 0},
}
NUM_STEPS, NUM_ROWS, ROWS_A_BATCH = 4, 8, 1


def trained(name: str, settings: dict[str, Any] | None, *, checkpoints: bool) -> Any:
    """What a run logs, its weights, and ours' reports."""
    from transformers import Trainer, TrainingArguments

    kind, _, tuned = name.partition("/")
    stock, device = KNOWN[kind], torch.device("cpu")
    assert stock is not None
    depth = 2 if stock.layers == ("num_hidden_layers",) else None
    model = stock.model(stock.config(16, tiny=True, depth=depth), device)
    model = with_lora(model) if tuned else model
    if checkpoints:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its name in the next one
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    rows: list[dict[str, Tensor]] = []
    given = stock.batch(model.config, 2, 16, device)
    for number in range(NUM_ROWS):
        rows.append({key: each[number % len(each)] for key, each in given.items()})
    arguments = TrainingArguments(
        output_dir="out",
        max_steps=NUM_STEPS,
        per_device_train_batch_size=ROWS_A_BATCH,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=3,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    ours = ssdtrain.OffloadCallback(**settings) if settings is not None else None
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,  # type: ignore[arg-type]
        eval_dataset=rows[:2],  # type: ignore[arg-type]
        callbacks=[] if ours is None else [ours],
    )
    trainer.train()
    logged = [
        row[key]
        for row in trainer.state.log_history
        for key in ("loss", "eval_loss", "grad_norm")
        if key in row
    ]
    weights = {key: each.detach().clone() for key, each in model.state_dict().items()}
    return [logged, weights], [] if ours is None else ours.reports


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_is_equal_bit_by_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/lora" in name:
        pytest.importorskip("peft")
    theirs, _ = trained(name, None, checkpoints=False)
    assert len(set(theirs[0])) > NUM_STEPS, json.dumps(theirs[0])  # it does train
    for settings in SETTINGS.values():
        ours, reports = trained(name, settings, checkpoints=False)
        assert same_bits(ours, theirs)
        assert len(reports) == NUM_STEPS
        moved = [r.bytes_offloaded + r.bytes_recomputed for r in reports]
        assert any(moved)
    if name not in CHECKPOINTED:
        return
    theirs, _ = trained(name, None, checkpoints=True)
    ours, _ = trained(name, MOVES, checkpoints=True)
    assert same_bits(ours, theirs)
