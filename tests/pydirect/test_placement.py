"""Section 4.4.3's rules, exhaustively: every mix of operands there is."""

import itertools
from pathlib import Path

import pytest

from pydirect.placement import (
    RULES,
    Affinity,
    Compute,
    Cpu,
    Mix,
    Operands,
    Result,
    Source,
    Written,
    mix_of,
    rule_for,
)

EVERY = [
    Operands(mix=mix, cuda=cuda, cpu=cpu, written=written, indexing=index)
    for mix, cuda, cpu, written, index in itertools.product(
        Mix, (False, True), Cpu, Written, (False, True)
    )
]


def expected(call: Operands) -> tuple[Compute, Result]:
    """The rules once more, as sentences and not as a table."""
    if call.written is Written.CPU:
        if call.cuda:
            return Compute.REFUSE, Result.NONE
        return Compute.HOST, Result.WRITTEN
    if call.cuda and call.cpu is Cpu.TENSORS and not call.indexing:
        return Compute.REFUSE, Result.NONE
    in_place = call.written is not Written.NOTHING
    if call.cuda:
        return Compute.GPU, Result.WRITTEN if in_place else Result.CUDA
    if call.mix is Mix.HOST:
        return Compute.HOST, Result.WRITTEN if in_place else Result.UNIFIED
    return Compute.GPU, Result.WRITTEN if in_place else Result.CUDA


@pytest.mark.parametrize("call", EVERY, ids=str)
def test_every_mix_is_placed_as_the_text_says(call: Operands) -> None:
    rule = rule_for(call)
    assert (rule.compute, rule.result) == expected(call)
    assert rule.why


def test_cpu_scalars_never_decide() -> None:
    for call in EVERY:
        if call.cpu is not Cpu.NONE or call.written is Written.CPU:
            continue
        with_scalars = Operands(
            mix=call.mix,
            cuda=call.cuda,
            cpu=Cpu.SCALARS,
            written=call.written,
            indexing=call.indexing,
        )
        there, here = rule_for(call), rule_for(with_scalars)
        assert (there.compute, there.result) == (here.compute, here.result)


def test_every_row_is_reached_and_says_where_it_comes_from() -> None:
    reached = {id(rule_for(call)) for call in EVERY}
    assert reached == {id(rule) for rule in RULES}
    assert {rule.source for rule in RULES} == set(Source)


@pytest.mark.parametrize(
    ("affinities", "mix"),
    [
        ([Affinity.HOST], Mix.HOST),
        ([Affinity.GPU, Affinity.GPU], Mix.GPU),
        ([Affinity.HOST, Affinity.GPU], Mix.BOTH),
    ],
)
def test_mix(affinities: list[Affinity], mix: Mix) -> None:
    assert mix_of(affinities) is mix


def cell(value: object) -> str:
    """One condition of a rule, in the words of the documentation."""
    if value is None:
        return "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(getattr(value, "value", value))


def test_the_documentation_prints_the_table() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "pydirect.md"
    head = "| unified operands | CUDA operand | CPU operands | written | subscript | "
    lines = [head + "computes | result | from |", "|--|--|--|--|--|--|--|--|"]
    for rule in RULES:
        fields = (rule.mix, rule.cuda, rule.cpu, rule.written, rule.indexing)
        ends = (rule.compute, rule.result, rule.source)
        lines.append("| " + " | ".join(map(cell, (*fields, *ends))) + " |")
    assert "\n".join(lines) in docs.read_text()
