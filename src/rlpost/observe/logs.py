"""What the library says: all of it to log.txt, what a person should read while the run goes on to the terminal too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NOTICE = 25  # a level of the library's own between INFO, which only log.txt has, and WARNING
FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"

logging.addLevelName(NOTICE, "NOTICE")


def setup_logging(
    run_dir: str | Path, rank: int = 0, show: Callable[[str], None] | None = None, shown_from: int = NOTICE
) -> list[logging.Handler]:
    """Send the library's log to `<run_dir>/log.txt`: everything of rank 0, the other ranks' warnings. What is
    `shown_from` or above goes to `show` as well. Returns the handlers; a second call replaces the first's (a notebook
    starts several runs)."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("rlpost")
    remove_handlers([h for h in logger.handlers if isinstance(h, (_RunLog, _Shown))])
    file = _RunLog(Path(run_dir) / "log.txt", encoding="utf-8")
    file.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    file.setFormatter(logging.Formatter(FORMAT if rank == 0 else f"[rank {rank}] {FORMAT}"))
    handlers: list[logging.Handler] = [file]
    if show is not None:
        handlers.append(_Shown(show, shown_from))
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handlers


def remove_handlers(handlers: list[logging.Handler]) -> None:
    for handler in handlers:
        logging.getLogger("rlpost").removeHandler(handler)
        handler.close()


class _RunLog(logging.FileHandler):
    """Known by its class, so that no handler of the user's is ever removed."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written (the disk is full) is lost; logging would show a traceback for each."""


class _Shown(logging.Handler):
    """Without times, names and tracebacks: those are in log.txt."""

    def __init__(self, show: Callable[[str], None], level: int):
        super().__init__(level)
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = prefix + record.getMessage()
        with suppress(OSError, ValueError):  # the terminal is gone, or closed: what warns must not fail by it
            self.show(text)
