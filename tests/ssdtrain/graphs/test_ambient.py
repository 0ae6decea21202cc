"""Nothing that stands around a session changes a bit: neither what it is attached
under, nor what the program, the forward and the layers run under."""

import warnings
from typing import Any

import pytest
import torch

import ssdtrain
from tests.ssdtrain.bits import same_bits
from tests.ssdtrain.graphs import ambient


@pytest.mark.parametrize("seed", range(24))
def test_what_stands_around_a_session_changes_nothing(seed: int) -> None:
    case = ambient.drawn(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of modes and deterministic algorithms
        theirs = ambient.train(case, None)
        assert same_bits(ambient.train(case, ssdtrain.offload), theirs), case


@pytest.mark.parametrize("attach", ["inference", "fake", "dispatch", "device"])
def test_a_session_is_attached_outside_of_modes(attach: str) -> None:
    settings = {"plan": "offload-all", "recompute": "regions"}
    case = ambient.Surroundings(attach, "nothing", "nothing", "nothing", settings)
    assert same_bits(ambient.train(case, ssdtrain.offload), ambient.train(case, None))


def test_layers_run_again_under_a_default_device() -> None:
    """A function mode that alters nothing but the device of new tensors."""
    settings = {"plan": "keep-all", "recompute": "regions"}
    case = ambient.Surroundings("nothing", "device", "nothing", "nothing", settings)
    sessions: list[ssdtrain.Session] = []

    def offload(*args: Any, **options: Any) -> ssdtrain.Session:
        with torch.device("meta"):
            sessions.append(ssdtrain.offload(*args, **options))
        return sessions[0]

    assert same_bits(ambient.train(case, offload), ambient.train(case, None))
    assert not sessions[0].regions_refused
