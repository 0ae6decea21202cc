"""TRL's own trainers at checkpointing's memory: loss and backward, generation left out.

    python -m recipes.bench models.trl_steps --case grpo
    python -m recipes.bench models.trl_steps --case sft
    python -m recipes.bench models.trl_steps --case grpo --tiny    # no GPU

`grpo`: the shape of Qwen3-1.7B, 8 completions of 2,048 random tokens and a random
reward. `sft`: LoRA on the shape of Qwen3-4B, one sequence of 16,384 tokens. Weights are
random. The first process trains as TRL does by default, under activation checkpointing;
the second one with `OffloadCallback`, whose `device_memory` is what the first one
reserved. A step is timed from the call of `compute_loss` to the end of its backward.
"""

import os
import statistics
import tempfile
from typing import Any, Literal, NamedTuple

import torch

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of
from recipes.bench.harness.timing import wait
from recipes.bench.models.stock import shape_of

WORDS = 200
"""Of the tokenizer: texts are random anyway."""
NUM_LAST = 5
"""Steps that are told."""
PROMPT = 16
"""Tokens."""
COLUMNS = ("checkpointing", "ssdtrain")
ROOM = 1.01
"""Of what checkpointing reserved: the allocator rounds up."""


class Size(NamedTuple):
    """Of a case."""

    model: str
    length: int
    """Of a completion or a sequence, in tokens."""
    rows: int


CASES = {"grpo": Size("qwen3-1.7b", 2048, 8), "sft": Size("qwen3-4b", 16384, 1)}


def model_of(name: str, device: torch.device, *, tiny: bool) -> Any:
    """Return a model of random weights."""
    stock = shape_of("tiny" if tiny else name)
    config = stock.config(depth=stock.depth)
    config.update({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})
    return stock.model(config, device, attn_implementation="sdpa")


def tokenizer_of() -> Any:
    """Return words that are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, WORDS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def timed(kind: type[Any], length: int) -> Any:
    """Return a trainer that notes when loss and backward begin and end."""

    class Timed(kind):  # type: ignore[misc]
        """`kind`, whose completions are random."""

        spans: list[tuple[float, float]]

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            """As the trainer's own."""
            self.begun = wait()
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """As the trainer's own."""
            loss = super().training_step(*args, **kwargs)
            self.spans.append((self.begun, wait()))
            return loss

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            drawn = torch.randint(3, WORDS, (len(prompt_ids), length))
            return drawn.tolist(), None

    return Timed


def trainer_of(case: str, callbacks: list[Any], *, steps: int, tiny: bool) -> Any:
    """Return TRL's trainer of a case."""
    from datasets import Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name, length, rows = CASES[case]
    length = 32 if tiny else length
    model, tokenizer = model_of(name, device, tiny=tiny), tokenizer_of()
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "logging_steps": 1,
        "learning_rate": 1e-5,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": device.type == "cpu",
        "bf16": device.type == "cuda",
        "optim": "adamw_torch_fused",
        "dataloader_pin_memory": device.type == "cuda",
    }
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if case == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        text = " ".join(f"w{3 + n}" for n in range(PROMPT))
        given |= {
            "args": GRPOConfig(
                **common,
                num_generations=rows,
                max_completion_length=length,
                num_iterations=1,
            ),
            "reward_funcs": random_reward,
            "train_dataset": Dataset.from_dict({"prompt": [text] * (steps * rows)}),
        }
        trainer = timed(GRPOTrainer, length)(**given, callbacks=callbacks)
    else:
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        tokens = torch.randint(3, WORDS, (steps * rows, length)).tolist()
        given |= {
            "args": SFTConfig(**common, max_length=length),
            "train_dataset": Dataset.from_dict({"input_ids": tokens}),
            "peft_config": LoraConfig(
                r=16, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        }
        trainer = timed(SFTTrainer, length)(**given, callbacks=callbacks)
    trainer.spans = []
    return trainer


def random_reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that nothing earns."""
    return torch.rand(len(completions)).tolist()


def measure(case: str, limit_bytes: int | None, steps: int, tiny: bool) -> Any:
    """Train in this process; without a limit as TRL does by default."""
    callbacks = []
    if limit_bytes is not None:
        from ssdtrain import OffloadCallback

        callbacks = [OffloadCallback(device_memory=limit_bytes)]
        if tiny:  # nothing to fit into
            callbacks = [OffloadCallback(plan="offload-all", min_bytes=0)]
    trainer = trainer_of(case, callbacks, steps=steps, tiny=tiny)
    trainer.train()
    times = [1e3 * (end - begin) for begin, end in trainer.spans]
    found: dict[str, Any] = {
        "step_ms": round(statistics.median(times[-NUM_LAST:]), 2),
        "steps_ms": [round(each, 1) for each in times],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    if torch.cuda.is_available():
        found["allocated_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if callbacks:
        found["moved_bytes"] = callbacks[0].reports[-1].bytes_offloaded
        found["rebuilt_bytes"] = callbacks[0].reports[-1].bytes_recomputed
        found["summary"] = callbacks[0].summary()
    return found


def main(
    bench: Bench,
    *,
    case: Literal["grpo", "sft"],
    steps: int = 26,
    tiny: bool = False,
    limit_s: float = 900,
) -> None:
    """Measure both columns of a case, each in a process of its own.

    Args:
        case: what to train
        steps: of training
        tiny: a small model, without a GPU
        limit_s: of a column
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    cells = bench.cells({"tiny": tiny})
    limit: int | None = None
    for each in COLUMNS:
        name = f"{case}/{each}"
        cells.run(name, answer_of, measure, (case, limit, steps, tiny), limit_s)
        if name not in cells or "step_ms" not in cells[name]:
            raise UsageError(
                f"{name} was not measured: {cells.data['cells'].get(name)}"
            )
        limit = int(ROOM * cells[name].get("reserved_bytes", 0))
    base, ours = (cells[f"{case}/{each}"] for each in COLUMNS)
    print(
        f"{case}: loss and backward {ours['step_ms']:.0f} ms, checkpointing "
        f"{base['step_ms']:.0f} ms: {ours['step_ms'] / base['step_ms']:.3f} of it "
        f"(wanted 0.95); peak {ours.get('allocated_gb', 0):.2f} of "
        f"{base.get('allocated_gb', 0):.2f} GB"
    )
    print(ours["summary"])
