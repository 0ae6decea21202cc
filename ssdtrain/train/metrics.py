"""Where a run's numbers go while it runs: JSON lines, TensorBoard, the terminal."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """`leg` is which run of a comparison; `values` are plain numbers."""

    def close(self) -> None:
        """Flush."""


class JsonLines:
    """One JSON object a step, flushed at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Append {"leg", "step", ...}."""
        self._file.write(json.dumps({"leg": leg, "step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars under `<leg>/<name>`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory))

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """One scalar for each number."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{leg}/{name}", value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()


class Terminal:
    """A progress bar on a terminal; a line a step elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("loss {task.fields[loss]:.4f}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._progress.start()

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Advance the leg's bar."""
        if not self._console.is_terminal:
            self._console.print(
                f"{leg:>16}  step {step + 1}/{self._steps}  "
                f"loss {values['loss']:.6f}  {values['step_ms']:.0f} ms",
                highlight=False,
            )
            return
        if leg not in self._tasks:
            self._tasks[leg] = self._progress.add_task(
                f"{leg:>16}", total=self._steps, loss=values["loss"]
            )
        self._progress.update(self._tasks[leg], completed=step + 1, loss=values["loss"])

    def close(self) -> None:
        """Leave the bars as they are."""
        self._progress.stop()


class Sinks:
    """Several sinks as one; as a context manager it closes them all."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def write(self, leg: str, step: int, values: dict[str, Any]) -> None:
        """Hand the numbers to every sink."""
        for sink in self._sinks:
            sink.write(leg, step, values)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sink in self._sinks:
            sink.close()


def open_sinks(directory: Path, steps: int, tensorboard: bool) -> Sinks:
    """The sinks of the first rank; files go to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    sinks: list[Sink] = [
        JsonLines(directory / "metrics.jsonl"),
        Terminal(Console(), steps),
    ]
    if tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard"))
    return Sinks(sinks)
