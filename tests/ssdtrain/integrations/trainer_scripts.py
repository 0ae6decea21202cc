"""A script for each trainer that `make integrations` installs: plain, with ssdtrain,
and whether SSDTRAIN is what switches it on. Not a test file."""

from tests.ssdtrain.integrations.scripts import END, SETTINGS

BLOCKS = (
    """
import torch
from torch import nn

torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

model = nn.Sequential(*[Block() for _ in range(4)])
data = torch.randn(4, 16, 32)
losses, callbacks = [], []

class Reports:
    def __init__(self, session):
        self.reports = session.steps
        session.close()
"""
    + SETTINGS
)
LOOP = """
for batch in data:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""
TITAN = (
    BLOCKS
    + """
from dataclasses import dataclass, field
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.config import Configurable, apply_overrides
from torchtitan.config.override import OverrideConfig

class Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config = field(
            default_factory=lambda: OptimizersContainer.Config(
                implementation="for-loop",
                param_groups=[
                    ParamGroupConfig(
                        pattern=".*",
                        optimizer_name="AdamW",
                        optimizer_kwargs={"lr": 1e-2},
                    )
                ],
            )
        )

root = Root.Config()
IMPORTS = []
#OVERRIDE
apply_overrides(OverrideConfig(imports=IMPORTS), root)
optimizer = root.optimizer.build(model_parts=[model])
"""
    + LOOP
    + """
if IMPORTS:
    callbacks = [Reports(optimizer.offloading)]
"""
    + END
)
VERL = (
    BLOCKS
    + """
import os
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
from verl.utils.activation_offload import enable_activation_offloading
if os.environ.get("SSDTRAIN"):  # verl's own needs a GPU
    enable_activation_offloading(model, "fsdp2", False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
    + LOOP
    + """
if os.environ.get("SSDTRAIN"):
    from ssdtrain.integrations.verl import SESSIONS
    callbacks = [Reports(each) for each in SESSIONS]
"""
    + END
    + "dist.destroy_process_group()\n"
)
TINY = (
    """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
)
model = LlamaForCausalLM(config)
rows = torch.randint(3, 64, (16, 48))
args = TrainingArguments(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, logging_steps=1,
    learning_rate=1e-2, report_to=[], disable_tqdm=True, save_strategy="no",
    use_cpu=True, dataloader_pin_memory=False,
)
given = dict(
    model=model, args=args, train_dataset=[{"input_ids": r, "labels": r} for r in rows],
)
"""
    + SETTINGS
)
TRAINED = (
    """
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
callbacks = trainer.callback_handler.callbacks
"""
    + END
)
AXOLOTL = (
    TINY
    + """
from axolotl.integrations.base import PluginManager
cfg = {"learning_rate": 1e-2}
#PLUGIN
manager = PluginManager.get_instance()
for name in cfg.get("plugins", ()):
    manager.register(name)
for plugin in manager.plugins.values():
    plugin.register(cfg)
for name in manager.get_input_args():
    module, _, kind = name.rpartition(".")
    model_of = getattr(__import__(module, fromlist=[kind]), kind)
    assert model_of(**{"ssdtrain": cfg["ssdtrain"]}).ssdtrain == cfg["ssdtrain"]
trainer = Trainer(**given, callbacks=manager.add_callbacks_pre_trainer(cfg, model))
for callback in manager.add_callbacks_post_trainer(cfg, trainer):
    trainer.add_callback(callback)
"""
    + TRAINED.replace(
        "trainer.train()", "trainer.train()\nmanager.post_train(cfg, model)"
    )
)
SWIFT = (
    TINY
    + """
from swift.trainers.mixin import SwiftMixin
from swift.utils import import_external_file
args.callbacks, args.max_epochs = [], None  # its arguments have them
#PLUGIN
trainer = Trainer(**given, callbacks=SwiftMixin._get_callbacks(None, args))
"""
    + TRAINED
)
SWIFT_FILE = """
with open("plugin.py", "w") as file:
    file.write(
        "from ssdtrain.integrations.swift import register\\n"
        "register(plan='offload-all', min_bytes=0, target='host', window_bytes=16384)"
    )
"""
SWIFT_PLUGIN = (
    SWIFT_FILE
    + """
import_external_file("plugin.py")
args.callbacks = ["ssdtrain"]
"""
)
NEMO = (
    BLOCKS
    + """
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.launcher.interactive import InteractiveLauncher
from nemo_automodel.recipes.llm import train_ft

# The recipe's own needs a GPU and a checkpoint.
recipes = []
def setup(self):
    recipes.append(self)
    self.model_parts = [model]
    self.optimizer = [torch.optim.AdamW(model.parameters(), lr=1e-2)]

def run_train_validation_loop(self):
    for batch in data:
        loss = self.model_parts[0](batch).square().mean()
        loss.backward()
        self.optimizer[0].step()
        self.optimizer[0].zero_grad()
        losses.append(loss.item())

kind = train_ft.TrainFinetuneRecipeForNextTokenPrediction
kind.setup, kind.run_train_validation_loop = setup, run_train_validation_loop
target = f"{kind.__module__}.{kind.__name__}"
cfg = {"distributed": {"strategy": "fsdp2"}}
#RECIPE
InteractiveLauncher()._run_recipe_in_process(target, ConfigNode(cfg))
callbacks = [Reports(each.offloading) for each in recipes if "ssdtrain" in cfg]
"""
    + END
)
RECIPE = """
target = "ssdtrain.integrations.nemo.OffloadingRecipe"
cfg.update(recipe=target, ssdtrain=SETTINGS)
"""
LLAMAFACTORY = (
    BLOCKS
    + """
import llamafactory.v1.core.base_trainer as base

class Trained:
    pass

trainer = Trained()
trainer.model = model
handler = base.CallbackHandler([], trainer=trainer)
args = state = None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
handler.on_train_begin(args, state)
for batch in data:
    handler.on_step_begin(args, state)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    handler.on_step_end(args, state)
handler.on_train_end(args, state)
callbacks = handler.callbacks
"""
    + END
)
PLUGIN = """cfg.update(
    plugins=["ssdtrain.integrations.axolotl.SSDTrainPlugin"],
    ssdtrain=SETTINGS,
)"""
OVERRIDE = 'IMPORTS = [("ssdtrain.integrations.torchtitan.offload", SETTINGS)]'
SCRIPTS = {
    "axolotl": (AXOLOTL, AXOLOTL.replace("#PLUGIN", PLUGIN), False),
    "torchtitan": (TITAN, TITAN.replace("#OVERRIDE", OVERRIDE), False),
    "verl": (VERL, VERL, True),
    "llamafactory": (LLAMAFACTORY, LLAMAFACTORY, True),
    "swift": (SWIFT, SWIFT.replace("#PLUGIN", SWIFT_PLUGIN), False),
    "swift by SSDTRAIN": (SWIFT, SWIFT, True),
    "nemo_automodel": (NEMO, NEMO.replace("#RECIPE", RECIPE), False),
}
