"""Settings of trainers that no package imports, refused in a line."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import pytest
from omegaconf import OmegaConf

from ssdtrain.errors import ConfigError
from ssdtrain.train.targets import build_trainer, in_a_line, refuse_unfit


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Part:
    def __init__(self, *, size: int = 1) -> None:
        if size > 5:
            raise ValueError(f"expected size <= 5, got {size}")


class Machine:
    def __init__(
        self,
        *,
        count: int = 1,
        share: float | None = None,
        on: bool = False,
        colour: Colour | str = "red",
        sizes: Sequence[int] = (),
        part: Part | None = None,
        make: Callable[..., Any] = Part,
        anything: Any = None,
    ) -> None:
        pass

    def run(self) -> None:
        pass


HERE = __name__


@pytest.mark.parametrize(
    "values",
    [
        {"count": 2, "share": 1, "on": True, "colour": "green", "sizes": [1, 2]},
        {"share": None, "part": None, "anything": ["x"]},
        {"part": {"_target_": f"{HERE}.Part", "size": 2}},
        {"make": {"_target_": f"{HERE}.Part", "_partial_": True}},
    ],
)
def test_what_fits_passes(values: dict[str, Any]) -> None:
    refuse_unfit({"_target_": f"{HERE}.Machine", **values}, "trainer")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"count": "x"}, "trainer.count expects an integer, got 'x'"),
        ({"count": True}, "trainer.count expects an integer, got True"),
        ({"count": 1.5}, "trainer.count expects an integer, got 1.5"),
        ({"share": "x"}, "trainer.share expects a finite number or null, got 'x'"),
        ({"share": float("nan")}, "expects a finite number or null, got nan"),
        ({"on": 1}, "trainer.on expects true or false, got 1"),
        ({"colour": "gren"}, "'red' or 'green', got 'gren'; did you mean 'green'?"),
        ({"sizes": 3}, "trainer.sizes expects a list, each an integer, got 3"),
        ({"sizes": [1, "a"]}, "a list, each an integer, got [1, 'a']"),
        ({"part": 3}, "trainer.part expects Part (a node with _target_) or null"),
        ({"make": None}, "trainer.make expects"),
        ({"cuont": 3}, "unknown setting trainer.cuont; did you mean 'count'?"),
        (
            {"part": {"_target_": f"{HERE}.Part", "size": "big"}},
            "trainer.part.size expects an integer, got 'big'",
        ),
        ({"part": {"_target_": f"{HERE}.Prat"}}, "trainer.part._target_"),
        ({"part": {"_target_": "torch.randn"}}, "trainer.part._target_ expects a cl"),
        ({"part": {"_target_": "builtins.dict"}}, "whose parameters Python can tell"),
        ({"part": {"_target_": "nowhere.Part"}}, "this needs nowhere, which is not"),
    ],
)
def test_what_does_not_is_told_in_a_line(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unfit({"_target_": f"{HERE}.Machine", **values}, "trainer")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target",
    [
        "foo",
        "os.system",
        f"{HERE}.Nobody",
        3,
        "torch.randn",
        "torch.Tensor",
        "builtins.dict",
        "torch.nn.Identity",  # a class that cannot run
    ],
)
def test_only_a_class_trains(target: object) -> None:
    config = OmegaConf.create({"trainer": {"_target_": target}})
    with pytest.raises(ConfigError, match=r"trainer\._target_"):
        build_trainer(config)


def test_the_cause_is_told_with_its_key() -> None:
    part = {"_target_": f"{HERE}.Part", "size": 9}
    config = {"trainer": {"_target_": f"{HERE}.Machine", "part": part}}
    with pytest.raises(ConfigError) as caught:
        build_trainer(OmegaConf.create(config))
    assert str(caught.value) == "expected size <= 5, got 9 (trainer.part)"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("two\nlines"), "two lines"),
        (RuntimeError("broken"), "RuntimeError: broken"),
        (ModuleNotFoundError(name="scipy.sparse"), "pip install 'ssdtrain[gnn]'"),
        (
            RuntimeError("[enforce fail] you tried to allocate 153600 bytes."),
            "153600 bytes of memory were asked for at once and are not there",
        ),
        (MemoryError(), "MemoryError: no reason given"),
    ],
)
def test_an_error_in_a_line(error: Exception, told: str) -> None:
    assert told in in_a_line(error)
