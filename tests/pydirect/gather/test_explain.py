"""What `explain` says of a gather, and where it has it from."""

import numpy as np
import pytest
import torch

import pydirect
from pydirect import coalesce, gather, memory
from pydirect.gather.model import reference_translation

TABLE = torch.zeros(3000, 100)


def test_models_and_words() -> None:
    index = torch.randint(0, 3000, (500,))
    told = pydirect.explain(TABLE, index)
    assert (told.num_indices, told.row_bytes) == (500, 400)
    assert told.table_bytes == TABLE.nbytes and told.memory is memory.Reach.NONE
    assert told.path is gather.Path.CPU and not told.settled and not told.measured_ms
    assert set(told.predicted_ms) == set(gather.Path)
    requests = coalesce.row_requests(index.numpy(), 400, coalesce.Access.ALIGNED)
    assert told.requests_a_row == pytest.approx(requests.total / 500)
    assert told.full_share == requests.full_share
    assert 0.8 < told.link_share < 0.9, "400 bytes leave broken lines"
    model = reference_translation()
    assert told.row_ns == model.random_row_ns(400, TABLE.nbytes)
    assert told.sorted_row_ns == model.sorted_row_ns(400, TABLE.nbytes, 500)
    said = str(told)
    for part in ("path cpu", "plain memory", "foretold", "requests a row", "ns a row"):
        assert part in said
    for path in gather.Path:
        assert path.value in said


def test_whole_lines_reach_more_of_the_link() -> None:
    index = torch.arange(500)
    shares = [
        gather.explain(torch.zeros(3000, width), index).link_share
        for width in (1, 25, 32)
    ]
    assert shares == sorted(shares) and shares[-1] > 0.9


@pytest.mark.parametrize(
    "table",
    [TABLE, memory.HostTable(TABLE), pydirect.unify(TABLE)],
    ids=["tensor", "host table", "unified"],
)
def test_every_kind_of_table(table: torch.Tensor) -> None:
    told = pydirect.explain(table, torch.tensor([-1, 2]))
    assert told.num_indices == 2 and told.row_bytes == 400


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="1-D index"):
        pydirect.explain(TABLE, torch.zeros(2, 2))
    with pytest.raises(ValueError, match="contiguous CPU table"):
        pydirect.explain(TABLE.t(), torch.tensor([1]))
    with pytest.raises(ValueError, match="max_sms: expects at least 1"):
        pydirect.explain(TABLE, torch.tensor([1]), max_sms=0)
    assert pydirect.explain(TABLE, torch.tensor([], dtype=torch.int64)).num_indices == 0
    assert pydirect.explain(TABLE[:0], torch.tensor([], dtype=torch.int64)).row_bytes


@pytest.mark.parametrize("rows", [5, [0, 1], None, np.arange(2)])
def test_rows_that_are_no_tensor_are_named(rows: object) -> None:
    for table in (torch.ones(3, 4), torch.ones(3, 4).to("unified")):
        with pytest.raises(TypeError, match="for the first n rows"):
            pydirect.explain(table, rows)
    with pytest.raises(TypeError, match="got ndarray: pass torch"):
        pydirect.explain(np.ones((3, 4)), torch.arange(2))
    with pytest.raises(ValueError, match="pass mask"):
        pydirect.explain(torch.ones(3, 4), torch.tensor([True, False, True]))
