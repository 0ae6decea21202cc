"""TRL's own trainers at checkpointing's memory: loss and backward, generation left out.

    python -m recipes.bench models.trl_steps --case grpo
    python -m recipes.bench models.trl_steps --case sft
    python -m recipes.bench models.trl_steps --case grpo --tiny    # no GPU

`grpo`: the shape of Qwen3-1.7B, 8 completions of 2,048 random tokens and a random
reward. `sft`: LoRA on the shape of Qwen3-4B, one sequence of 16,384 tokens. Weights are
random. The first process trains as TRL does by default, under activation checkpointing;
the second one with `OffloadCallback`, whose `memory_budget` is the measured peak of the
first one above the level before the loss; the third one as the first, if time is left.
A step is timed from the call of `compute_loss` to the end of its backward, a cycle from
one such call to the next. Steps before the plan is settled are not timed.
"""

import itertools
import os
import statistics
import tempfile
import time
from typing import Any, Literal, NamedTuple

import torch
from transformers import TrainerCallback

from recipes.bench.harness.cli import Bench, UsageError
from recipes.bench.harness.processes import answer_of
from recipes.bench.harness.timing import Peak, wait
from recipes.bench.models.stock import shape_of

WORDS = 200
"""Of the tokenizer: texts are random anyway."""
NUM_WARM = 2
"""Steps before the first timed one."""
NUM_TIMED = 6
MOST_STEPS = 80
PROMPT = 16
"""Tokens."""
BASE, OURS, AGAIN = "checkpointing", "ssdtrain", "checkpointing again"
TINY_BUDGETS = {"grpo": 600_000, "sft": 250_000}
"""Bytes: a CPU tells no peak."""
PRELOAD = ("trl.trainer.{case}_trainer", "peft", "datasets")


class Size(NamedTuple):
    """Of a case."""

    model: str
    length: int
    """Of a completion or a sequence, in tokens."""
    rows: int


CASES = {"grpo": Size("qwen3-1.7b", 2048, 8), "sft": Size("qwen3-4b", 16384, 1)}


class Step(NamedTuple):
    """A loss and its backward."""

    start_s: float
    end_s: float
    base_bytes: int
    """Allocated before."""
    peak_bytes: int
    """Above that."""


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

        steps: list[Step]

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            """As the trainer's own."""
            self.begun, self.memory = wait(), Peak(self.accelerator.device)
            return super().compute_loss(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            """As the trainer's own."""
            loss = super().training_step(*args, **kwargs)
            memory = self.memory.base, self.memory.most
            self.steps.append(Step(self.begun, wait(), *memory))
            return loss

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            drawn = torch.randint(3, WORDS, (len(prompt_ids), length))
            return drawn.tolist(), None

    return Timed


class Until(TrainerCallback):  # type: ignore[misc]
    """Ends training when enough steps were timed."""

    def __init__(self, ours: Any, warm_s: float) -> None:
        """`ours`: the callback whose plan has to settle, within `warm_s`; or None."""
        self._ours, self._warm_s = ours, warm_s
        self._begun = time.monotonic()
        self.seconds_before = 0.0
        self.is_settled = False
        self.num_before = 0
        """Steps that are not timed; 0: not known yet."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        if self.num_before:
            if state.global_step >= self.num_before + NUM_TIMED:
                control.should_training_stop = True
            return
        self.seconds_before = round(time.monotonic() - self._begun, 1)
        self.is_settled = self._ours is None or self._ours.session.is_settled
        is_late = self.seconds_before > self._warm_s
        if state.global_step >= NUM_WARM and (self.is_settled or is_late):
            self.num_before = state.global_step


def trainer_of(case: str, callbacks: list[Any], *, tiny: bool) -> Any:
    """Return TRL's trainer of a case."""
    from datasets import Dataset

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name, length, rows = CASES[case]
    length = 32 if tiny else length
    model, tokenizer = model_of(name, device, tiny=tiny), tokenizer_of()
    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": MOST_STEPS,
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
            "train_dataset": Dataset.from_dict({"prompt": [text] * MOST_STEPS * rows}),
        }
        trainer = timed(GRPOTrainer, length)(**given, callbacks=callbacks)
    else:
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        tokens = torch.randint(3, WORDS, (MOST_STEPS * rows, length)).tolist()
        given |= {
            "args": SFTConfig(**common, max_length=length),
            "train_dataset": Dataset.from_dict({"input_ids": tokens}),
            "peft_config": LoraConfig(
                r=16, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        }
        trainer = timed(SFTTrainer, length)(**given, callbacks=callbacks)
    trainer.steps = []
    return trainer


def random_reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward that nothing earns."""
    return torch.rand(len(completions)).tolist()


def measure(case: str, budget_bytes: int | None, warm_s: float, tiny: bool) -> Any:
    """Train in this process; without a budget as TRL does by default."""
    ours = None
    if budget_bytes is not None:
        from ssdtrain import OffloadCallback

        least = {"min_bytes": 0} if tiny else {}
        ours = OffloadCallback(
            memory_budget=budget_bytes or TINY_BUDGETS[case], **least
        )
    until = Until(ours, warm_s)
    trainer = trainer_of(case, [*filter(None, [ours]), until], tiny=tiny)
    trainer.train()
    steps: list[Step] = trainer.steps[until.num_before :]
    times = [1e3 * (step.end_s - step.start_s) for step in steps]
    starts = [step.start_s for step in steps]
    cycles = [1e3 * (b - a) for a, b in itertools.pairwise(starts)]
    found: dict[str, Any] = {
        "step_ms": round(statistics.median(times), 2),
        "steps_ms": [round(each, 1) for each in times],
        "cycle_ms": round(statistics.median(cycles), 2),
        "steps_before": until.num_before,
        "seconds_before": until.seconds_before,
        "settled": until.is_settled,
        "checkpoints": any(
            getattr(each, "gradient_checkpointing", False)
            for each in trainer.model.modules()
        ),
        "peak_bytes": max(step.peak_bytes for step in steps),
        "allocated_gb": max(step.base_bytes + step.peak_bytes for step in steps) / 1e9,
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    }
    if torch.cuda.is_available():
        found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    if ours is not None:
        last = ours.reports[-1]
        found |= {
            "saved_bytes": last.bytes_saved,
            "kept_bytes": last.bytes_kept,
            "moved_bytes": last.bytes_offloaded,
            "rebuilt_bytes": last.bytes_recomputed,
            "stall_ms": round(last.stall_ms, 2),
            "summary": ours.summary(),
        }
    return found


def main(
    bench: Bench,
    *,
    case: Literal["grpo", "sft"],
    warm_s: float = 25,
    tiny: bool = False,
    limit_s: float = 300,
) -> None:
    """Measure the columns of a case, each in a process of its own.

    Args:
        case: what to train
        warm_s: most of a warm-up
        tiny: a small model, without a GPU
        limit_s: of a column
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    cells = bench.cells({"tiny": tiny})
    preload = [each.format(case=case) for each in PRELOAD]
    budget: int | None = None
    for each in (BASE, OURS, AGAIN):
        name = f"{case}/{each}"
        given = case, budget if each == OURS else None, warm_s, tiny
        cells.run(name, answer_of, measure, given, limit_s, preload)
        if name in cells and "step_ms" in cells[name]:
            budget = cells[name]["peak_bytes"]
        elif each != AGAIN:
            found = cells.data["cells"].get(name)
            raise UsageError(f"{name} was not measured: {found}")
