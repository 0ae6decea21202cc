"""Lightning and Fabric: a stock script and SSDTRAIN; the factories are entry points,
which tests/packaging looks for in the wheel."""

from pathlib import Path

import pytest

from ssdtrain.errors import AttachError, ConfigError
from ssdtrain.switch import VARIABLE
from tests.ssdtrain.integrations.scripts import ALL, END, assert_equal_bits, run

pytest.importorskip("lightning")
from ssdtrain.integrations import lightning as ours

MODEL = """
import torch
from torch import nn
import lightning
import lightning.fabric.fabric as fabrics
import lightning.pytorch.trainer.connectors.callback_connector as trainers

# What an installed wheel tells both: the checkout may be installed without.
from ssdtrain.integrations.lightning import fabric_callbacks, trainer_callbacks
GROUPS = {
    "lightning.fabric.callbacks_factory": fabric_callbacks,
    "lightning.pytorch.callbacks_factory": trainer_callbacks,
}
for module in fabrics, trainers:
    module._load_external_callbacks = lambda group: GROUPS[group]()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
)
data = torch.randn(64, 32)
losses = []
"""
TRAINER = """
class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        loss = self.model(batch).square().mean()
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

trainer = lightning.Trainer(
    accelerator="cpu", max_steps=4, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Task(), torch.utils.data.DataLoader(data, batch_size=16))
callbacks = trainer.callbacks
"""
FABRIC = """
fabric = lightning.Fabric(accelerator="cpu", devices=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
prepared, optimizer = fabric.setup(model, optimizer)
for batch in data.split(16):
    loss = prepared(batch).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
callbacks = fabric._callbacks
"""


@pytest.mark.slow
@pytest.mark.parametrize("body", [TRAINER, FABRIC], ids=["trainer", "fabric"])
def test_equal_bits(body: str, tmp_path: Path) -> None:
    text = MODEL + body + END
    assert_equal_bits(run(text, tmp_path, ALL), run(text, tmp_path))


def test_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ours.trainer_callbacks() == [] == ours.fabric_callbacks()
    monkeypatch.setenv(VARIABLE, "fit")
    [callback] = ours.trainer_callbacks()
    [fabric] = ours.fabric_callbacks()
    assert callback.settings == fabric.settings
    assert callback.settings.device_memory == "fit"
    monkeypatch.setenv(VARIABLE, "fitt")
    for factory in (ours.trainer_callbacks, ours.fabric_callbacks):
        with pytest.raises(ConfigError, match="did you mean 'fit'"):
            factory()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fit")
    monkeypatch.setattr("ssdtrain.integrations.installed", lambda name: "9.1")
    for factory in (ours.trainer_callbacks, ours.fabric_callbacks):
        with pytest.raises(ConfigError, match=r"lightning>=2.5,<3; 9.1 is installed"):
            factory()


def test_a_second_trained_module_of_fabric_is_refused() -> None:
    import torch
    from lightning import Fabric
    from torch import nn

    callback = ours.FabricCallback(plan="keep-all")
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    fabric.setup(first)
    still = nn.Linear(4, 4).requires_grad_(False)
    fabric.setup(still)  # nothing to offload
    with pytest.raises(AttachError, match="a second one to train, Linear"):
        fabric.setup(second)
    callback.close()
    assert "forward" not in vars(first)
    assert torch.equal(first(torch.zeros(1, 4))[0], first.bias)
