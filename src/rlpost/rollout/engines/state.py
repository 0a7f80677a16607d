"""What every engine refuses, in one place: the states of the protocol, and the requests that no model can take."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from rlpost.rollout.engine import TAGS, EngineNotReady, Request, Tag


class EngineState:
    """How far an engine is between `start` and `commit`, and which of its memory sleeps.

    An engine asks it before each call of the protocol; each refusal is an EngineNotReady that says what to do first.

    Attributes: version, of the weights last committed. serving: between `commit` and the next `pause`. complete: all
    tensors arrived and `flush` succeeded. arrived: names loaded since `pause`. running: held by whatever computes.
    """

    def __init__(self) -> None:
        self.version = 0
        self.started = self.serving = self.complete = False
        self.asleep: set[Tag] = set()
        self.arrived: set[str] = set()
        self.running = threading.Lock()

    @contextmanager
    def starting(self) -> Iterator[None]:
        if self.started:
            raise EngineNotReady("start: the engine runs already")
        yield
        self.started = True

    def stop(self) -> None:
        """Only `start` can follow."""
        self.started = False
        self.asleep.clear()
        self._give_up_weights()

    @contextmanager
    def computing(self, what: str, needs: Sequence[Tag]) -> Iterator[None]:
        """Alone, on committed weights, with the memory of these tags awake."""
        with self.running:
            self.check_started(what)
            if asleep := [tag for tag in needs if tag in self.asleep]:
                raise EngineNotReady(f"{what}: {', '.join(asleep)} asleep; wake first")
            if not self.serving:
                why = "its weights were given up by pause or sleep" if self.version else "nothing was published yet"
                raise EngineNotReady(f"{what}: the engine does not serve before the next commit ({why})")
            yield

    @contextmanager
    def falling_asleep(self, tags: Sequence[Tag]) -> Iterator[None]:
        self._check_tags("sleep", tags, asleep=False)
        if not self.running.acquire(blocking=False):
            raise EngineNotReady("sleep: the engine is computing; drain it first")
        try:
            if "weights" in tags:
                self._give_up_weights()
            yield
            self.asleep.update(tags)
        finally:
            self.running.release()

    @contextmanager
    def waking(self, tags: Sequence[Tag]) -> Iterator[None]:
        self._check_tags("wake", tags, asleep=True)
        yield
        self.asleep.difference_update(tags)

    def pause(self) -> None:
        """Returns when nothing computes any more."""
        self.check_started("pause")
        self.serving = False
        with self.running:
            self._give_up_weights()

    def check_loading(self, what: str) -> None:
        self.check_started(what)
        if self.serving or self.complete:
            raise EngineNotReady(f"{what}: the engine holds a whole set of weights; pause it first")
        if "weights" in self.asleep:
            raise EngineNotReady(f"{what}: the weights are asleep; wake them first")

    @contextmanager
    def flushing(self, expected: Collection[str]) -> Iterator[None]:
        """expected: the names of all tensors that a publish must bring."""
        self.check_loading("flush")
        if missing := [name for name in expected if name not in self.arrived]:
            raise EngineNotReady(
                f"{len(missing)} of {len(expected)} tensors have not arrived since pause: {', '.join(missing[:5])}"
            )
        yield
        self.complete = True

    @contextmanager
    def committing(self, version: int) -> Iterator[None]:
        if not self.complete:
            raise EngineNotReady("commit: flush the loaded weights first")
        yield
        self.version = version
        self.serving = True

    def check_readable(self, what: str) -> None:
        self.check_started(what)
        if "weights" in self.asleep:
            raise EngineNotReady(f"{what}: the weights are asleep")

    def check_started(self, what: str) -> None:
        if not self.started:
            raise EngineNotReady(f"{what}: call start() first")

    def _check_tags(self, what: str, tags: Sequence[Tag], asleep: bool) -> None:
        self.check_started(what)
        for tag in tags:
            if tag not in TAGS:
                raise ValueError(f"engine tag {tag!r}: one of {', '.join(TAGS)}")
            if (tag in self.asleep) != asleep:
                raise EngineNotReady(f"{tag} is {'awake' if asleep else 'asleep'} already")

    def _give_up_weights(self) -> None:
        self.serving = self.complete = False
        self.arrived.clear()


class StatedEngine:
    """What of its state an engine tells."""

    _state: EngineState

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def started(self) -> bool:
        return self._state.started

    @property
    def serving(self) -> bool:
        return self._state.serving


def check_requests(requests: Sequence[Request], limit: int) -> None:
    """limit: positions of the model."""
    for i, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise ValueError(f"request {i}: the prompt is empty")
        if length + request.params.max_tokens > limit:
            raise ValueError(
                f"request {i}: {length} prompt tokens and max_tokens={request.params.max_tokens} "
                f"exceed the model's {limit} positions"
            )


def check_scoring(sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
    if len(sequences) != len(starts):
        raise ValueError(f"score: {len(sequences)} sequences but {len(starts)} starts")
    for i, (ids, start) in enumerate(zip(sequences, starts)):
        if not 1 <= start <= len(ids):
            raise ValueError(f"score: start {start} of sequence {i} with {len(ids)} tokens: 1 … {len(ids)}")
