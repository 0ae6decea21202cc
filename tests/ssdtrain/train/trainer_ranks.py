"""One rank of transformers.Trainer under ZeRO-3, whose parameters and optimizer's state
are offloaded too, without and with the callback. Not a test file; see test_callback.py.

    torchrun --nproc-per-node 2 trainer_ranks.py OUT.json
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ssdtrain
from tests.ranks import leave

# Compiled at start; without a compiler that fails.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def run(callbacks: list[Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    tokens = torch.randint(0, 128, (32, 64))
    args = TrainingArguments(
        output_dir="out",
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
        dataloader_pin_memory=False,
        deepspeed=ZERO,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = [weight.detach().numpy().tobytes() for weight in model.parameters()]
    assert all(weights)
    return {
        "losses": losses,
        "engine": type(trainer.model_wrapped).__name__,
        "offloads": trainer.model_wrapped.zero_offload_param() is not None,
        "weights": hashlib.sha256(b"".join(weights)).hexdigest(),
    }


def main(out: Path) -> None:
    callback = ssdtrain.OffloadCallback(
        target="host", min_bytes=0, plan="offload-all", window_bytes=16384
    )
    result = {"without": run([]), "with": run([callback])}
    result["reports"] = [report.as_dict() for report in callback.reports]
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
