"""Work on the shards of a dataset, one after the other, for all that wait for its result."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

Result = TypeVar("Result")


@dataclass(slots=True)
class SharedWork(Generic[Result]):
    """The state of such work. Who no longer waits does not stop it.

    Attributes:
        num_shards: of the dataset.
        num_done: shards that are done.
        num_reused: those of them whose results were stored before.
        shard: the name of the one done last.
        task: does it; None before `begin`.
        moved: is set with each shard that is done, and at the end.
    """

    num_shards: int
    num_done: int = 0
    num_reused: int = 0
    shard: str = ""
    task: "asyncio.Task[Result] | None" = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(
        self, work: Coroutine[Any, Any, Result], ended: Callable[[], None]
    ) -> "asyncio.Task[Result]":
        """Begin; `ended` is called as soon as it is over."""

        def over(_: "asyncio.Task[Result]") -> None:
            self.moved.set()
            ended()

        self.task = asyncio.create_task(work)
        self.task.add_done_callback(over)
        return self.task

    @property
    def is_over(self) -> bool:
        """Whether it has a result, has failed or was cancelled."""
        return bool(self.task and self.task.done())

    @property
    def has_failed(self) -> bool:
        """Whether it is over without a result."""
        task = self.task
        return bool(task and task.done() and (task.cancelled() or task.exception()))

    def after(self, shard: str, *, was_kept: bool) -> None:
        """One more shard is done, whose result may have been stored before."""
        self.num_done += 1
        self.num_reused += was_kept
        self.shard = shard
        self.moved.set()

    async def states(self) -> AsyncIterator[Self]:
        """This, whenever it has moved; at last it is over. At most one more than shards are left.

        Raises:
            GyreError: as the work.
        """
        assert self.task
        over = False
        while not over:
            if not self.task.done():
                self.moved.clear()
                await self.moved.wait()
            over = self.task.done()
            if over:
                self.task.result()
            yield self
