"""One region of memory in several processes."""

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pydirect
from pydirect import region
from pydirect.region import region_of

FORK = multiprocessing.get_context("fork")


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """Run ``work`` in a forked child and return what it returns (pickled)."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send(("done", work(*args)))
        except BaseException as error:
            sender.send(("raised", repr(error)))

    process = FORK.Process(target=child)
    process.start()
    state, value = receiver.recv()
    process.join()
    if state == "raised":
        raise RuntimeError(value)
    return value


def test_share_memory_moves_the_region_and_keeps_values() -> None:
    u = torch.arange(6.0).reshape(2, 3).to("unified").set_affinity_("host")
    assert not u.is_shared()
    assert u.share_memory_() is u
    assert u.is_shared() and u.affinity is pydirect.Affinity.HOST
    assert torch.equal(u.cpu(), torch.arange(6.0).reshape(2, 3))
    address = u.data_ptr()
    assert u.share_memory_().data_ptr() == address


def test_sharing_under_a_view_is_refused() -> None:
    u = torch.zeros(4).to("unified")
    view = u[1:]
    with pytest.raises(ValueError, match="before taking views"):
        u.share_memory_()
    del view
    u.share_memory_()


def test_children_write_what_the_parent_reads() -> None:
    u = torch.zeros(4).to("unified").set_affinity_("host").share_memory_()

    def write() -> None:
        u[1] = 7
        u[2:].add_(1)

    in_child(write)
    assert u.tolist() == [0, 7, 1, 1]


def test_a_region_travels_by_pickle_and_stays_one() -> None:
    """What each process would pin for its own GPU is the same memory."""
    u = torch.zeros(8).to("unified").set_affinity_("host").share_memory_()
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(u[2:6])

    def receive() -> tuple[bool, str, tuple[int, ...]]:
        got = queue.get()
        got.fill_(3)
        return region_of(got).is_shared, got.affinity.value, tuple(got.shape)

    assert in_child(receive) == (True, "host", (4,))
    assert u.tolist() == [0, 0, 3, 3, 3, 3, 0, 0]


def test_registering_one_shared_cpu_tensor_in_two_processes() -> None:
    table = torch.arange(12.0).reshape(3, 4).share_memory_()
    mine = pydirect.unify(table)

    def register_and_gather() -> list[list[float]]:
        theirs = pydirect.unify(table)
        return pydirect.to_host(theirs)[torch.tensor([2, 0])].tolist()

    assert mine.is_shared()
    want = table[torch.tensor([2, 0])].tolist()
    assert in_child(register_and_gather) == want
    assert mine[torch.tensor([2, 0])].tolist() == want


def test_parameters_and_plain_tensors_travel_as_before() -> None:
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(torch.nn.Parameter(torch.ones(2).to("unified")))
    queue.put(torch.ones(3))
    parameter, plain = queue.get(), queue.get()
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_unified
    assert plain.is_shared() and not plain.is_unified


def tell(tensors: dict[str, Any], device: torch.device, results: Any) -> None:
    """What a process that was started has been given."""
    assert device.type == "unified"
    results.put(
        {
            name: (
                type(t).__name__,
                t.affinity.value,
                t.requires_grad,
                pydirect.to_host(t.detach()).resolve_conj().tolist(),
            )
            for name, t in tensors.items()
        }
    )
    pydirect.to_host(tensors["shared"])[0] = 42


def test_processes_that_are_started() -> None:
    """Private memory travels as a copy, of what the tensor shows; shared stays one."""
    rows = torch.arange(6.0).reshape(3, 2)
    tensors = {
        "gpu": rows.to("unified"),
        "host": rows.to("unified").set_affinity_("host"),
        "unify": pydirect.unify(rows.clone()),
        "view": rows.to("unified")[1:, 1],
        "conj": torch.tensor([1 + 2j]).to("unified").conj(),
        "none": torch.empty(0, 3).to("unified"),
        "leaf": torch.nn.Parameter(rows.to("unified")),
        "shared": rows.to("unified").share_memory_(),
    }
    want = {
        name: (
            type(t).__name__,
            t.affinity.value,
            t.requires_grad,
            pydirect.to_host(t.detach()).resolve_conj().tolist(),
        )
        for name, t in tensors.items()
    }
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(
        target=tell, args=(tensors, torch.device("unified"), results)
    )
    process.start()
    assert results.get(timeout=120) == want
    process.join(60)
    assert process.exitcode == 0
    assert pydirect.to_host(tensors["shared"])[0].tolist() == [42, 42]
    assert float(pydirect.to_host(tensors["gpu"])[0, 0]) == 0


def test_a_view_of_private_memory_travels_alone() -> None:
    """A row of a table is a row's bytes, not the table's."""
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(torch.arange(3000.0).reshape(1000, 3).to("unified")[7])
    got = queue.get()
    assert got.tolist() == [21, 22, 23] and got.untyped_storage().nbytes() == 12


def test_room_on_a_cpu_storage_is_the_cpus() -> None:
    """How PyG's workers ask for memory that they gather into."""
    u = torch.arange(6.0).reshape(3, 2).to("unified")
    room = u.new(u.untyped_storage()._new_shared(16)).view(2, 2)
    assert room.device.type == "cpu" and room.is_shared()
    index = torch.tensor([2, 0])
    assert torch.index_select(u, 0, index, out=room).tolist() == [[4, 5], [0, 1]]
    assert u.new(u.untyped_storage()).is_unified


class Rows(Dataset[torch.Tensor]):
    """Rows of a unified table, worked on by the CPU of a worker."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return int(self.table.shape[0])

    def __getitem__(self, item: int) -> torch.Tensor:
        return self.table[item] * 2


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_workers_read_in_place(workers: int) -> None:
    table = torch.arange(20.0).reshape(10, 2)
    u = table.to("unified").set_affinity_("host")
    loader = DataLoader(Rows(u), batch_size=4, num_workers=workers)
    batches = list(loader)
    assert all(batch.is_unified for batch in batches)
    assert torch.equal(torch.cat([b.cpu() for b in batches]), table * 2)


def test_a_forked_worker_of_a_process_that_uses_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not touch CUDA: it works on host affinity, and what it makes has it."""
    u = torch.arange(4.0).to("unified").set_affinity_("host")
    mapped = torch.ones(2).to("unified")
    monkeypatch.setattr(region, "_had_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    u[1] = 7
    u[2:].add_(torch.ones(2))
    assert u.tolist() == [0, 7, 3, 4]
    for made in (torch.ones(2, device="unified"), u.clone(), torch.zeros_like(mapped)):
        assert made.affinity is pydirect.Affinity.HOST
    with pytest.raises(pydirect.PlacementError, match="start workers by spawn"):
        mapped + 1
    monkeypatch.setattr(region, "_had_gpu", lambda: False)
    assert (mapped + 1).tolist() == [2, 2]


def test_graph_tensors_do_not_travel() -> None:
    u = torch.ones(2).to("unified").set_affinity_("host").requires_grad_()
    with pytest.raises(ValueError, match="detach it first"):
        torch.multiprocessing.get_context("fork").SimpleQueue().put(u[:1])
    assert pickle.loads(pickle.dumps(u.detach())).tolist() == [1, 1]


def test_threads() -> None:
    u = torch.zeros(8, 1000).to("unified").set_affinity_("host")
    errors: list[BaseException] = []

    def work(row: int) -> None:
        try:
            for _ in range(50):
                u[row].add_(1)
                _ = (u[row] * 2).sum().item()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert u.cpu().eq(50).all()
