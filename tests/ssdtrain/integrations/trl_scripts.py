"""Trainers of TRL on a tiny model, each as a script. Not a test file."""

from collections.abc import Sequence

from tests.ssdtrain.integrations.scripts import END, MODEL

TOKENIZER = """
model.save_pretrained("tiny")  # a reference model is loaded again
model = LlamaForCausalLM.from_pretrained("tiny")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 64)}}
made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
)
tokenizer.padding_side = "left"
from datasets import Dataset

def text(n, length):
    values = torch.randint(3, 64, (length,), generator=torch.Generator().manual_seed(n))
    return " ".join(f"w{each}" for each in values.tolist())
"""
COMMON = """
common = dict(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, logging_steps=1,
    learning_rate=1e-2, report_to=[], disable_tqdm=True, save_strategy="no",
    use_cpu=True, dataloader_pin_memory=False, bf16=False, seed=1,
)
"""
LORA = """
from peft import LoraConfig
lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
"""
RUN = """
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
callbacks = trainer.callback_handler.callbacks
model = trainer.model
"""
SFT = """
from trl import SFTConfig, SFTTrainer
data = Dataset.from_dict({"input_ids": tokens.tolist()})
trainer = SFTTrainer(
    model=model, args=SFTConfig(**common, gradient_accumulation_steps=2, OPTIONS),
    train_dataset=data, processing_class=tokenizer, PEFT
)
"""
PAIRS = """
data = Dataset.from_dict({
    "prompt": [text(n, 8) for n in range(16)],
    "chosen": [" " + text(n + 100, 30) for n in range(16)],
    "rejected": [" " + text(n + 200, 24) for n in range(16)],
})
"""
DPO = """
from trl import DPOConfig, DPOTrainer
trainer = DPOTrainer(
    model=model, args=DPOConfig(**common, OPTIONS),
    train_dataset=data, processing_class=tokenizer, PEFT
)
"""
REWARD = """
from trl import RewardConfig, RewardTrainer
from transformers import LlamaForSequenceClassification
config.num_labels = 1
model = LlamaForSequenceClassification(config)
trainer = RewardTrainer(
    model=model, args=RewardConfig(**common, OPTIONS),
    train_dataset=data.remove_columns("prompt"), processing_class=tokenizer, PEFT
)
"""
GROUP = """
def reward(completions, **kwargs):
    words = [each.split() for each in completions]
    return [len(set(each)) + 0.1 * each.count("w11") for each in words]

data = Dataset.from_dict({"prompt": [text(n, 8) for n in range(16)]})
group = dict(
    num_generations=4, max_completion_length=24, temperature=1.0, num_iterations=2,
    gradient_accumulation_steps=2,
)
common["per_device_train_batch_size"] = 4
"""
GRPO = """
from trl import GRPOConfig, GRPOTrainer
trainer = GRPOTrainer(
    model=model, args=GRPOConfig(**common, **group, OPTIONS),
    reward_funcs=reward, train_dataset=data, processing_class=tokenizer, PEFT
)
"""
ALTERNATING = """
generate, count, masked = trainer._generate_single_turn, 0, []

def cut(*args, **kwargs):
    global count
    count += 1
    completions, *others = generate(*args, **kwargs)
    if count % 2:  # some end early, so the batch is padded to the same width
        completions[1::2] = [each[:12] for each in completions[1::2]]
    return completions, *others

def note(module, args, kwargs):
    if torch.is_grad_enabled():
        mask = kwargs["attention_mask"]
        masked.append((tuple(mask.shape), not bool(mask.all())))

trainer._generate_single_turn = cut
trainer.model.register_forward_pre_hook(note, with_kwargs=True)
"""
"""Every other generation of GRPO gives a batch that needs a mask."""
PEAKS = """
FOUND["peaks"] = [
    each.saved_peak_bytes
    for callback in callbacks if hasattr(callback, "reports")
    for each in callback.reports
]
FOUND["masked"] = masked
with open("out.json", "w") as file:
    json.dump(FOUND, file)
"""
BODIES = {
    "sft": SFT,
    "dpo": PAIRS + DPO,
    "reward": PAIRS + REWARD,
    "grpo": GROUP + GRPO,
    "rloo": GROUP + GRPO.replace("GRPO", "RLOO"),
}


LEAVES = """
import json
everything = {}
for name, text in SCRIPTS.items():
    names = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    everything[name] = names["FOUND"]
with open("out.json", "w") as file:
    json.dump(everything, file)
"""


def script(which: str, options: str = "gradient_checkpointing=False") -> str:
    """The whole script of a trainer, such as `grpo` or `grpo lora`."""
    name, _, lora = which.partition(" ")
    body = BODIES[name].replace("OPTIONS", options)
    body = body.replace("PEFT", "peft_config=lora," if lora else "")
    return MODEL + TOKENIZER + COMMON + LORA + body + RUN + END


def scripts(which: Sequence[str]) -> str:
    """One script that runs several, one after another, for one start of Python."""
    return f"SCRIPTS = { {each: script(each) for each in which}!r}\n" + LEAVES


def alternating() -> str:
    """GRPO for 24 steps, whose batches alternate between padded and unpadded."""
    text = script("grpo").replace("max_steps=4", "max_steps=24")
    return text.replace(RUN, ALTERNATING + RUN) + PEAKS
