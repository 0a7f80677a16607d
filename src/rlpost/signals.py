"""Ctrl-C, SIGTERM, SIGHUP: the first one finishes the phase and saves, a second one stops at once."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlpost.failures import PhaseError
from rlpost.launcher import STOPPED, leave

if TYPE_CHECKING:
    from rlpost.phases import Agreement

log = logging.getLogger(__name__)

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNWIND_S = 2.0  # for the main thread to end by itself after the second signal


class StopOnSignal:
    """A context manager for the main thread.

    Python runs a signal's handler only between two steps of its interpreter, which a collective that hangs never
    reaches. So the interpreter writes each signal's number to a pipe, and a thread that reads it does what is asked.
    """

    def __init__(self, agreement: Agreement):
        self.agreement = agreement
        self._former: dict[int, Any] = {}
        self._seen = 0  # by the main thread

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python gives signals to the main thread alone
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._former_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
                self._former[number] = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._heed, name="rlpost-signals", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not self._former:
            return
        if isinstance(error, PhaseError) and self.agreement.distributed:
            return  # torchrun sends SIGTERM to the ranks that are left, which have yet to say why they end
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_pipe)
        os.close(self._write)
        self._thread.join()
        self._former = {}

    def _on_signal(self, number: int, frame: Any) -> None:
        self._seen += 1
        if self._seen > 1:
            raise KeyboardInterrupt

    def _heed(self) -> None:
        count = 0
        while byte := os.read(self._read, 1):
            if byte[0] not in self._former:
                continue
            count += 1
            if count == 1:
                self.agreement.stop_requested = True
                self._say(signal.Signals(byte[0]).name)
            elif count == 2:
                threading.Thread(target=self._insist, daemon=True).start()
        os.close(self._read)

    def _say(self, name: str) -> None:
        # torchrun sends SIGTERM to all ranks when one has failed: then the failure is what there is to say.
        with suppress(RuntimeError):
            if self.agreement.watch.posted() or self.agreement.watch.lost():
                return
        log.warning("%s: finishing the phase, then saving; once more to stop at once", name)

    def _insist(self) -> None:
        """The main thread may be where no exception reaches it."""
        threading.Event().wait(UNWIND_S)
        if self._former:
            if self.agreement.rank == 0:
                print(STOPPED, file=sys.stderr)
            leave(130)
