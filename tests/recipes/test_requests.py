"""The benchmark of requests against counters, without a GPU."""

import json
from pathlib import Path

from recipes.bench.harness.cli import run
from recipes.bench.traversal import requests

ONE, TWO = (requests.BEST.format(what) for what in ("requests", "sectors"))
COUNTED = f"""==PROF== Profiling "merged_push_i32"
"ID","Kernel Name","{ONE}.sum","{TWO}.sum","launch__grid_size"
"","","request","sector",""
"0","merged_push_i32","1,900","4,000","264"
"1","merged_push_i32","100","1","264"
"""


def test_the_model_next_to_the_counters(tmp_path: Path) -> None:
    told = requests.sums(COUNTED.splitlines())
    assert told == {ONE: 2000, TWO: 4001}
    graph = requests.graph_of(1000)
    model = requests.count_requests(graph, "merged")
    cell = requests.cell(model, told)
    assert cell["requests_ratio"] == round(model.total / 2000, 4)
    assert cell["sectors_ratio"] == round(model.moved_bytes / 32 / 4001, 4)
    out = tmp_path / "requests.json"
    words = ["--shrink", "1000", "--device", "cpu", "--out", str(out)]
    assert run(["traversal.requests", *words]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert cells["lists, merged"]["requests"] == model.total
    assert cells["rows of 512 B"]["sectors"] == 16 * 100
