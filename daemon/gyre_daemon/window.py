"""The prefetch window: which steps are fetched, ready, sent and held. A state machine: events in, answers out, nothing waits.

A step is `in flight` from `begin` to `seal`, `ready` from `seal` to `send`, `held` from `send` to `release`. Steps are begun
and sent in order, and sealed and released in any. The window bounds the steps that are in flight or ready; credit bounds what
is sent.
"""


class Window:
    """The steps `[first_step, end_step)` of one session, seen through a window of `size` batches."""

    def __init__(self, first_step: int, end_step: int | None, size: int) -> None:
        self.size = size
        self.next_to_begin = first_step
        self.next_to_send = first_step
        self.end_step = end_step
        self.credits = 0
        self._ready: set[int] = set()
        self._held: set[int] = set()

    @property
    def num_ready(self) -> int:
        """Sealed and not sent."""
        return len(self._ready)

    @property
    def num_in_flight(self) -> int:
        """Begun and not sealed."""
        return self.next_to_begin - self.next_to_send - len(self._ready)

    @property
    def num_held(self) -> int:
        """Sent and not released."""
        return len(self._held)

    @property
    def at_end(self) -> bool:
        """Every step has been sent."""
        return self.next_to_send == self.end_step

    @property
    def head_ready(self) -> bool:
        """The next step to be sent is sealed."""
        return self.next_to_send in self._ready

    def room(self) -> int:
        """How many steps more may be begun."""
        room = self.size - (self.next_to_begin - self.next_to_send)
        return room if self.end_step is None else min(room, self.end_step - self.next_to_begin)

    def begin(self) -> int:
        """The step to fetch next; call only where there is room."""
        step = self.next_to_begin
        self.next_to_begin += 1
        return step

    def seal(self, step: int) -> None:
        """A step's batch is whole."""
        self._ready.add(step)

    def add_credit(self, num_batches: int) -> None:
        """The client takes so many batches more."""
        self.credits += num_batches

    def send(self) -> int | None:
        """The step to send now, or None: its batch is not whole, or no credit is left."""
        if not self.credits or not self.head_ready:
            return None
        step = self.next_to_send
        self.credits -= 1
        self.next_to_send += 1
        self._ready.remove(step)
        self._held.add(step)
        return step

    def release(self, step: int) -> bool:
        """A client no longer needs a step; False where it does not hold it (twice released, or never sent)."""
        if step not in self._held:
            return False
        self._held.remove(step)
        return True
