"""`dgl.data`: the base of data sets of one's own, and files of graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hector.message.saved import load_graphs, save_graphs

__all__ = ["DGLDataset", "load_graphs", "save_graphs"]


class DGLDataset:
    """Base of data sets: `process` makes what `__getitem__` and `__len__` give; where
    `has_cache` says so, `load` reads what `save` wrote instead."""

    def __init__(
        self,
        name: str,
        url: str | None = None,
        raw_dir: str | None = None,
        save_dir: str | None = None,
        hash_key: object = (),
        force_reload: bool = False,
        verbose: bool = False,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        """`url` is for `download`, which does nothing unless it is written; `hash_key`
        is not read."""
        self.name, self.url, self.verbose = name, url, verbose
        self.raw_dir = raw_dir or str(Path.home() / ".dgl")
        self.save_dir = save_dir or self.raw_dir
        self._transform = transform
        if not force_reload and self.has_cache():
            self.load()
        else:
            if not Path(self.raw_path).exists():
                self.download()
            self.process()
            self.save()

    @property
    def raw_path(self) -> str:
        """Return where files lie that were downloaded."""
        return str(Path(self.raw_dir) / self.name)

    @property
    def save_path(self) -> str:
        """Return where `save` writes."""
        return str(Path(self.save_dir) / self.name)

    def download(self) -> None:
        """Do nothing."""

    save = load = download

    def has_cache(self) -> bool:
        """Return whether `load` finds something."""
        return False

    def process(self) -> None:
        """Make the data."""
        raise NotImplementedError(f"{type(self).__name__} expects a method process()")

    def __getitem__(self, idx: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} expects __getitem__(idx)")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} expects __len__()")


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"dgl.data.{name} is not taken; read PyG's data sets, and give dgl.graph their "
        "edge_index, or dgl.heterograph.from_hetero_data the typed ones"
    )
