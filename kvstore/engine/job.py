"""Background work written as generators: each `yield` hands out what to wait for, and resumes with its answer.

    def seal(...) -> Steps[None]:
        error = yield io(queue, [op])

What is yielded is a function that takes `resume`; it calls `resume(answer)` exactly once, now or later, on the
engine's thread. No threads, no event loop: the completions of the device and the log drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from kvstore.device.base import IoKind, IoOp
from kvstore.types.flow import FlowClass

Wait = Callable[[Callable[[Any], None]], None]
"""Starts something and calls the given function with its answer."""

T = TypeVar("T")
Steps = Generator[Wait, Any, T]
"""A job that ends with a T; `yield from` calls a part of one."""


class IoQueue(Protocol):
    """The drive's dispatch queue as the engine uses it: `op.owner` is called with the op when it has completed."""

    @property
    def queued(self) -> int:
        """Operations that wait."""

    def submit(self, op: IoOp) -> None: ...


def start(steps: Steps[None], on_end: Callable[[], None] | None = None) -> None:
    """Run a job until its first wait; completions carry it on, and `on_end` is called behind its last step."""
    _advance(steps, None, on_end)


def _advance(steps: Steps[None], answer: Any, on_end: Callable[[], None] | None) -> None:
    # A wait may answer before it returns: loop then, or a long job would nest a frame per step.
    while True:
        try:
            wait = steps.send(answer)
        except StopIteration:
            if on_end is not None:
                on_end()
            return
        resume = _Resume(steps, on_end)
        wait(resume)
        if not resume.answered_now:
            resume.waiting = True
            return
        answer = resume.answer


class _Resume:
    """The `resume` of one wait."""

    __slots__ = ("_on_end", "_steps", "answer", "answered_now", "waiting")

    def __init__(self, steps: Steps[None], on_end: Callable[[], None] | None) -> None:
        self._steps = steps
        self._on_end = on_end
        self.answer: Any = None
        self.answered_now = False
        self.waiting = False

    def __call__(self, answer: Any = None) -> None:
        if self.waiting:
            self.waiting = False
            _advance(self._steps, answer, self._on_end)
        else:
            self.answer = answer
            self.answered_now = True


def io(queue: IoQueue, ops: Sequence[IoOp]) -> Wait:
    """Submit operations; answers with the first error among them, None when all went well."""

    def begin(resume: Callable[[Any], None]) -> None:
        left = len(ops)
        first: OSError | None = None

        def done(op: IoOp) -> None:
            nonlocal left, first
            left -= 1
            first = first or op.error
            if not left:
                resume(first)

        if not ops:
            resume(None)
            return
        for op in ops:
            op.owner = done
        for op in ops:
            queue.submit(op)

    return begin


def gather(jobs: Sequence[Steps[T]]) -> Wait:
    """Run jobs side by side; answers with the list of what each ended with, in order."""

    def begin(resume: Callable[[Any], None]) -> None:
        left = len(jobs)
        results: list[Any] = [None] * left

        def run(at: int, job: Steps[T]) -> Steps[None]:
            results[at] = yield from job

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                resume(results)

        if not jobs:
            resume(results)
        for at, job in enumerate(jobs):
            start(run(at, job), ended)

    return begin


class Syncer:
    """fdatasync shared by all who ask while one is running: it covers what had completed before it was submitted."""

    def __init__(self, queue: IoQueue) -> None:
        self._queue = queue
        self._running = False
        self._next: list[Callable[[OSError | None], None]] = []

    def sync(self, on_done: Callable[[OSError | None], None]) -> None:
        """Call back when every write that has completed by now is on stable storage."""
        self._next.append(on_done)
        if not self._running:
            self._start()

    def _start(self) -> None:
        self._running = True
        callers, self._next = self._next, []

        def done(op: IoOp) -> None:
            self._running = False
            for caller in callers:
                caller(op.error)
            if self._next and not self._running:
                self._start()

        self._queue.submit(IoOp(IoKind.SYNC, 0, [], flow=FlowClass.WRITEBACK, owner=done))
