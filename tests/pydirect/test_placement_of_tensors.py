"""The placement table against real calls: every mix of up to three operands."""

import itertools

import pytest
import torch

import pydirect
from pydirect.placement import (
    Compute,
    Cpu,
    Mix,
    Operands,
    Result,
    Written,
    mix_of,
    rule_for,
)

HAS_GPU = torch.cuda.is_available()
VALUES = {
    "host": torch.tensor([1.0, 2.0]),
    "gpu": torch.tensor([3.0, 5.0]),
    "cuda": torch.tensor([7.0, 11.0]),
    "cpu": torch.tensor([13.0, 17.0]),
    "scalar": torch.tensor(19.0),
}
KINDS = [kind for kind in VALUES if HAS_GPU or kind != "cuda"]
# In place, the first operand is written; a scalar cannot take the others' shape.
CALLS = [
    (kinds, in_place)
    for num in (1, 2, 3)
    for kinds in itertools.permutations(KINDS, num)
    for in_place in (False, True)
    if set(kinds) & {"host", "gpu"} and not (in_place and kinds[0] == "scalar")
    # Whether CUDA's addcmul takes a CPU scalar depends on the release of PyTorch.
    if not (HAS_GPU and num == 3 and "scalar" in kinds)
]


def operand(kind: str) -> torch.Tensor:
    """A fresh operand with the values of its kind."""
    value = VALUES[kind].clone()
    if kind in ("host", "gpu"):
        return value.to("unified").set_affinity_(kind)
    return value.to("cuda") if kind == "cuda" else value


def facts(kinds: tuple[str, ...], in_place: bool) -> Operands:
    """What the rules look at."""
    unified = [pydirect.Affinity(k) for k in kinds if k in ("host", "gpu")]
    cpu = Cpu.SCALARS if "scalar" in kinds else Cpu.NONE
    written = {"cuda": Written.CUDA, "cpu": Written.CPU}.get(kinds[0], Written.UNIFIED)
    return Operands(
        mix=mix_of(unified),
        cuda="cuda" in kinds,
        cpu=Cpu.TENSORS if "cpu" in kinds else cpu,
        written=written if in_place else Written.NOTHING,
    )


def call(operands: list[torch.Tensor], in_place: bool) -> torch.Tensor:
    """An operator of one, two or three operands."""
    name = {1: "neg", 2: "mul", 3: "addcmul"}[len(operands)] + "_" * in_place
    result: torch.Tensor = getattr(operands[0], name)(*operands[1:])
    return result


@pytest.mark.parametrize(("kinds", "in_place"), CALLS, ids=str)
def test_calls_are_placed_by_the_table(kinds: tuple[str, ...], in_place: bool) -> None:
    rule = rule_for(facts(kinds, in_place))
    operands = [operand(kind) for kind in kinds]
    if rule.compute is Compute.REFUSE:
        with pytest.raises(pydirect.PlacementError, match="one processor can reach"):
            call(operands, in_place)
        return
    result = call(operands, in_place)
    assert torch.equal(result.cpu(), call([VALUES[k].clone() for k in kinds], in_place))
    if in_place:
        assert result is operands[0]
    elif rule.result is Result.UNIFIED:
        assert result.is_unified and result.affinity is pydirect.Affinity.HOST
    else:
        assert result.device.type == ("cuda" if HAS_GPU else "cpu")


def test_every_mix_is_there() -> None:
    met = {facts(kinds, in_place).mix for kinds, in_place in CALLS}
    assert met == set(Mix)
    rules = {id(rule_for(facts(kinds, in_place))) for kinds, in_place in CALLS}
    assert len(rules) >= (12 if HAS_GPU else 8)
