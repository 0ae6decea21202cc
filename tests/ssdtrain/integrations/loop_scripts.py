"""Scripts that train with a trainer's own loop, from its own configuration: plain, with
ssdtrain, and whether SSDTRAIN is what switches it on. Not a test file."""

import textwrap

from tests.ssdtrain.integrations.scripts import END, MODEL, SETTINGS
from tests.ssdtrain.integrations.trainer_scripts import PLUGIN, RECIPE, SWIFT_FILE

CHECKPOINT = (
    MODEL
    + SETTINGS
    + """
import json
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 64)}}
made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
model.save_pretrained("tiny")
PreTrainedTokenizerFast(
    tokenizer_object=made, pad_token="<pad>", unk_token="<pad>", bos_token="<s>",
    eos_token="</s>",
).save_pretrained("tiny")
with open("data.jsonl", "w") as file:
    for row in tokens.tolist():
        told = [f"w{each}" for each in row]
        row = {"instruction": " ".join(told[:8]), "input": ""}
        print(json.dumps({**row, "output": " ".join(told[8:])}), file=file)

trainers = []

def keep(kind, name):
    \"\"\"Let `kind.name` leave its trainer in `trainers`.\"\"\"
    real = getattr(kind, name)
    def method(self, *args, **kwargs):
        trainers.append(self)
        return real(self, *args, **kwargs)
    setattr(kind, name, method)
"""
)
OF_TRANSFORMERS = (
    """
[trainer] = trainers
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
callbacks, model = trainer.callback_handler.callbacks, trainer.model
"""
    + END
)
FACTORY = (
    """
import os
os.makedirs("torchaudio", exist_ok=True)  # LLaMA-Factory imports it, for no text
open("torchaudio/__init__.py", "w").close()
"""
    + CHECKPOINT
)
LLAMAFACTORY = (
    FACTORY
    + """
from llamafactory.train.tuner import run_exp
from transformers import Trainer
keep(Trainer, "train")
with open("dataset_info.json", "w") as file:
    json.dump({"data": {"file_name": "data.jsonl"}}, file)
run_exp(dict(
    stage="sft", model_name_or_path="tiny", finetuning_type="full", do_train=True,
    dataset="data", dataset_dir=".", template="empty", cutoff_len=64, output_dir="out",
    max_steps=4, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2,
    disable_gradient_checkpointing=True, report_to="none", save_strategy="no",
    use_cpu=True, dataloader_pin_memory=False, overwrite_output_dir=True,
))
"""
    + OF_TRANSFORMERS
)
LLAMAFACTORY_V1 = (
    FACTORY
    + """
import llamafactory.v1.core.base_trainer as base
from llamafactory.v1.trainers.sft_trainer import run_sft
keep(base.BaseTrainer, "fit")
losses = []

class Losses(base.TrainerCallback):
    def on_step_end(self, args, state, **kwargs):
        losses.append(state.loss)

base.LoggingCallback = Losses  # v1 keeps no history
with open("data.yaml", "w") as file:
    file.write("data: {path: data.jsonl, source: local, converter: alpaca}")
run_sft(dict(
    model="tiny", template="chatml", train_dataset="data.yaml", cutoff_len=64,
    output_dir="out", micro_batch_size=2, max_steps=4, learning_rate=1e-2, bf16=False,
    batching_workers=0, enable_activation_checkpointing=False,
))
[trainer] = trainers
callbacks, model = trainer.callback_handler.callbacks, trainer.model
"""
    + END
)
AXOLOTL = (
    CHECKPOINT
    + """
import os
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
import yaml
from axolotl.cli.train import do_cli
from transformers import Trainer
keep(Trainer, "train")
cfg = dict(
    base_model="tiny", datasets=[dict(path="data.jsonl", type="alpaca")],
    output_dir="out", sequence_len=256, val_set_size=0, max_steps=4, logging_steps=1,
    micro_batch_size=2, gradient_accumulation_steps=1, learning_rate=1e-2, bf16=False,
    optimizer="adamw_torch", lr_scheduler="constant", attn_implementation="sdpa",
    gradient_checkpointing=False, save_strategy="no", dataset_num_proc=1,
    dataloader_num_workers=0, dataloader_pin_memory=False, seed=1,
)
#PLUGIN
with open("axolotl.yaml", "w") as file:
    yaml.safe_dump(cfg, file)
do_cli("axolotl.yaml")
"""
    + OF_TRANSFORMERS
)
# Its processes that tokenize import the script.
AXOLOTL = 'if __name__ == "__main__":\n' + textwrap.indent(AXOLOTL, "    ")
SWIFT = (
    CHECKPOINT
    + """
from swift.pipelines import sft_main
from transformers import Trainer
keep(Trainer, "train")
more = []
#PLUGIN
sft_main([
    "--model", "tiny", "--model_type", "llama", "--template", "default",
    "--dataset", "data.jsonl", "--tuner_type", "full", "--torch_dtype", "float32",
    "--output_dir", "out", "--max_steps", "4", "--logging_steps", "1",
    "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1",
    "--learning_rate", "1e-2", "--gradient_checkpointing", "false",
    "--save_strategy", "no", "--report_to", "none", "--use_cpu", "true",
    "--dataloader_num_workers", "0", "--dataset_num_proc", "1", *more,
])
"""
    + OF_TRANSFORMERS
)
TITAN = (
    CHECKPOINT
    + """
import os
import sys
import types
os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"
)
torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan looks for GPUs

from datasets import load_dataset
from torchtitan import train
from torchtitan.components import metrics
from torchtitan.distributed import utils
from torchtitan.hf_datasets import text_datasets
from torchtitan.models.common.attention import FlexAttention
from torchtitan.trainer import Trainer
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

def dense(q, k, v, *, block_mask, scale, enable_gqa, **_):
    rows, _, length, _ = q.shape
    mask = create_mask(block_mask.mask_mod, rows, None, length, length, device="cpu")
    return scaled_dot_product_attention(
        q, k, v, mask, scale=scale, enable_gqa=enable_gqa
    ), None

FlexAttention._compiled_flex_attn = dense  # flex_attention has no backward on a CPU
text_datasets.DATASETS["tiny"] = text_datasets.DatasetConfig(
    path="data.jsonl",
    loader=lambda path: load_dataset("json", data_files=path, split="train"),
    sample_processor=lambda row: row["output"],
)
losses = []

class Monitor:
    device_name, device_index = "CPU", 0

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass

def log(self, step, global_avg_loss, *args, **kwargs):
    losses.append(global_avg_loss)

metrics.build_device_memory_monitor = Monitor
utils.set_pg_timeouts = lambda **_: None  # it waits for a GPU
metrics.MetricsProcessor.log = log
keep(Trainer, "train")
more = []
#PLUGIN
sys.argv = [
    "train.py", "--module", "llama3", "--config", "llama3_debugmodel", *more,
    "--hf_assets_path", "tiny", "--dataloader.dataset", "tiny",
    "--training.steps", "4", "--training.seq_len", "64",
    "--training.local_batch_size", "2", "--training.disable_cuda_graphs",
    "--lr_scheduler.warmup_steps", "0", "--debug.seed", "1",
    "activation_checkpoint:none",
]
train.main()
[trainer] = trainers
[model] = trainer.model_parts
session = getattr(trainer.optimizers, "offloading", None)
callbacks = [] if session is None else [types.SimpleNamespace(reports=session.steps)]
"""
    + END
)
TITAN_OVERRIDE = """
offload = "ssdtrain.integrations.torchtitan.offload=" + json.dumps(SETTINGS)
more = ["--override.imports", offload]
"""
SWIFT_PLUGIN = (
    SWIFT_FILE
    + """
more = ["--external_plugins", "plugin.py", "--callbacks", "ssdtrain"]
"""
)
NEMO = (
    CHECKPOINT
    + """
import types
torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = lambda: None
torch.cuda.max_memory_allocated = lambda: 0
torch.cuda.current_device = lambda: torch.device("cpu")
from nemo_automodel._transformers import auto_model
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.launcher.interactive import InteractiveLauncher
from nemo_automodel.recipes.llm import train_ft

class Torch:
    # torch, whose GPUs are the CPU

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, *_):
        return torch.device("cpu")

auto_model.torch = Torch()
kind, losses = train_ft.TrainFinetuneRecipeForNextTokenPrediction, []
keep(kind, "run_train_validation_loop")
log = kind.log_train_metrics

def log_train_metrics(self, sample):
    losses.append(sample.metrics["loss"])
    return log(self, sample)

kind.log_train_metrics = log_train_metrics
target = f"{kind.__module__}.{kind.__name__}"
components = "nemo_automodel.components"
cfg = dict(
    seed=1, dist_env=dict(backend="gloo"), checkpoint=dict(enabled=False),
    step_scheduler=dict(
        global_batch_size=2, local_batch_size=2, max_steps=4, num_epochs=1,
    ),
    model=dict(
        _target_="nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        pretrained_model_name_or_path="tiny",
    ),
    distributed=dict(strategy="fsdp2"),
    loss_fn=dict(_target_=f"{components}.loss.masked_ce.MaskedCrossEntropy"),
    dataset=dict(
        _target_=f"{components}.datasets.llm.mock.build_unpacked_dataset",
        num_sentences=16, vocab_size=64,
    ),
    dataloader=dict(
        _target_="torchdata.stateful_dataloader.StatefulDataLoader",
        collate_fn=f"{components}.datasets.utils.default_collater",
    ),
    optimizer=dict(_target_="torch.optim.AdamW", lr=1e-2),
)
#PLUGIN
InteractiveLauncher()._run_recipe_in_process(target, ConfigNode(cfg))
[trainer] = trainers
[model] = trainer.model_parts
session = getattr(trainer, "offloading", None)
callbacks = [] if session is None else [types.SimpleNamespace(reports=session.steps)]
"""
    + END
)
LOOPS = {
    "nemo_automodel": (NEMO, NEMO.replace("#PLUGIN", RECIPE), False),
    "torchtitan": (TITAN, TITAN.replace("#PLUGIN", TITAN_OVERRIDE), False),
    "swift": (SWIFT, SWIFT.replace("#PLUGIN", SWIFT_PLUGIN), False),
    "swift by SSDTRAIN": (SWIFT, SWIFT, True),
    "axolotl": (AXOLOTL, AXOLOTL.replace("#PLUGIN", PLUGIN), False),
    "llamafactory": (LLAMAFACTORY, LLAMAFACTORY, True),
    "llamafactory v1": (LLAMAFACTORY_V1, LLAMAFACTORY_V1, True),
}
