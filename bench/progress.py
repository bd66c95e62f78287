"""How far a measurement has come, on stderr."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Steps(AbstractContextManager["Steps"]):
    """A progress bar on stderr, or a line a step where nobody watches a terminal."""

    def __init__(self, total: float) -> None:
        console = Console(stderr=True)
        self._lines = None if console.is_terminal else console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=self._lines is not None,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __call__(self, what: str, work: float) -> None:
        """One step done: what it was, and its share of the total."""
        if self._lines is not None:
            self._lines.print(what, highlight=False)
        self._bar.update(self._task, advance=work, description=f"{what:52}")

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._bar.tasks[0].total)
        self._bar.stop()
