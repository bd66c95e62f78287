"""Host threads that run one at a time, on a virtual clock, in an order that somebody chooses.

The threads are real, since the code under test blocks wherever it likes; a baton decides which of them runs, and it
changes hands only where that code calls the backend. Nothing depends on real time or on the operating system's
scheduler, so the same choices give the same run.
"""

from __future__ import annotations

from _thread import LockType
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, TypeAlias

from kvlane.streams.simulated.order import Actor, Clock, OrderError
from kvlane.streams.simulated.threads import HostThreads, held_lock

Use: TypeAlias = Literal["look", "change", "open", "await", "take"]
"""How a turn uses something that is shared:

- `look`: sees what it is like
- `change`: makes it different for those who look, take or wait
- `open`: the same, and lets go on who could not before
- `await`: could not have come before it was opened
- `take`: the same, and nobody else can until it is opened again
"""


class Touch(NamedTuple):
    """Something that threads and streams share, by its number, used in a turn."""

    thing: int
    use: Use


MAX_STEPS = 2_000_000
_MOST_MADE = 1 << 32
TICK_S = 1e-6
"""What a step takes where the clock only counts."""


class Chooser(Protocol):
    """Decides what runs next wherever there is a choice."""

    @property
    def watches(self) -> bool:
        """Whether it wants to be asked where there is no choice, too, and to be told of every turn by `took`."""

    def choose(self, options: Sequence[Actor], may_stay: bool) -> int:
        """One of several options; with `may_stay` the first of them is that the running thread goes on."""

    def took(self, touched: frozenset[Touch]) -> None:
        """What the turn that was chosen last has touched."""

    def stall_s(self) -> float:
        """How long the running thread stands still before its next call; 0 for not at all."""


class Step(Protocol):
    """Something a device could do next."""

    @property
    def actor(self) -> Actor: ...

    def step(self) -> None: ...


class Gate(Protocol):
    """What holds a thread up until it is open."""

    @property
    def open(self) -> bool: ...


class Aborted(BaseException):
    """The run has failed elsewhere: unwinds a thread, through whatever would catch an error of its own."""


class Timer:
    """Something due at a time, unless it was called off."""

    __slots__ = ("off", "then")

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.off = False


class Task:
    """One host thread of the code under test."""

    __slots__ = ("actor", "baton", "gate", "thing", "timed_out", "timer", "waits_for")

    def __init__(self, actor: Actor, baton: LockType, thing: int) -> None:
        self.actor = actor
        self.thing = thing  # its beginning and its end
        self.baton = baton
        self.gate: Gate | None = None
        self.timer: Timer | None = None  # of the wait it is in
        self.timed_out = False
        self.waits_for = ""


class Scheduler:
    """The baton, the clock, and what is due when. Only the thread that holds the baton calls it.

    Args:
        timed: the clock decides when the device's work is done. Otherwise the chooser does: any piece of it that is
            under way may end next, whatever it would take, and the clock only counts steps. What is due at a time
            comes once nothing else can.
        jumps: without a clock: it may come before that, too, any time.
    """

    def __init__(self, chooser: Chooser, threads: HostThreads, *, timed: bool, jumps: bool = False) -> None:
        self.timed = timed
        self.time = 0.0
        self.error: BaseException | None = None
        self.actors: list[Actor] = []
        self.steps: Callable[[], Sequence[Step]] = tuple
        self._touched: set[Touch] = set()
        self.main = self.current = Task(self.actor("main"), held_lock(), 0)
        self._chooser = chooser
        self._threads = threads
        self._tasks = [self.main]
        self._ready: list[Task] = []
        self._joining: list[Task] = []
        self._ended: list[Task] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._timers_set = 0
        self._clock = _Jump(self, self.actor("clock")) if jumps and not timed else None
        self._steps_left = MAX_STEPS

    def actor(self, name: str, knows: Clock | None = None) -> Actor:
        """A new one; the number before its name tells two of the same name apart."""
        self.actors.append(Actor(len(self.actors), f"{len(self.actors)}:{name}", knows))
        return self.actors[-1]

    @property
    def me(self) -> Actor:
        """The running thread."""
        return self.current.actor

    def thing(self) -> int:
        """A number for something that is shared: the same in every order in which its maker comes to make it."""
        self.me.made += 1
        return self.me.id * _MOST_MADE + self.me.made

    def touch(self, thing: int, use: Use) -> None:
        """The turn under way uses something that is shared."""
        if self._chooser.watches:
            self._touched.add(Touch(thing, use))

    def end_turn(self) -> None:
        """Tell the chooser what the turn has touched."""
        if self._chooser.watches:
            self._chooser.took(frozenset(self._touched))
            self._touched.clear()

    def point(self, gate: Gate | None = None) -> None:
        """The running thread comes to a call: others may come first, and will as long as the gate is closed."""
        self.check()
        self.current.gate, self.current.waits_for = gate, "a lock"
        if (stall := self._chooser.stall_s()) > 0:
            self.sleep(stall)
        if self._ready or not self.timed or (gate is not None and not gate.open):
            self._switch(may_stay=True)
        self.current.gate = None

    def sleep(self, seconds: float) -> None:
        """The running thread is busy, or stands still, for a time."""
        self.check()
        if not self.timed:
            self.time += TICK_S
            self._switch(may_stay=True)
        elif seconds > 0:
            self.block([], "time to pass", seconds)

    def block(
        self, waiting: list[Task], waits_for: str, timeout_s: float | None = None, thing: int | None = None
    ) -> bool:
        """Hold the running thread until it is woken among `waiting`; False when the time passed first.

        `thing` is what the others touch that wake it.
        """
        self.check()
        if timeout_s is not None and timeout_s <= 0:
            return False
        task = self.current
        task.timed_out, task.waits_for = False, waits_for
        waiting.append(task)
        if timeout_s is not None:

            def time_out() -> None:
                task.timed_out, task.timer = True, None
                waiting.remove(task)
                if thing is not None:
                    self.touch(thing, "change")
                self._ready.append(task)

            task.timer = self.at(self.time + timeout_s, time_out)
        self._switch(may_stay=False)
        return not task.timed_out

    def wake(self, waiting: list[Task]) -> None:
        """All that wait there go on."""
        for task in waiting:
            if task.timer is not None:
                task.timer.off = True
                task.timer = None
            self._ready.append(task)
        waiting.clear()

    def at(self, time: float, then: Callable[[], None]) -> Timer:
        timer = Timer(then)
        self._timers_set += 1
        heappush(self._timers, (time, self._timers_set, timer))
        return timer

    def check(self) -> None:
        """Raises once the run has failed: its error in the main thread, `Aborted` in all others."""
        if self.error is not None:
            raise self.error if self.current is self.main else Aborted

    def fail(self, error: BaseException) -> None:
        """The run is over; its first error stands, whatever the code under test makes of it."""
        if self.error is None:
            self.error = error

    def start(self, job: Callable[[], None], name: str) -> None:
        """Run a job on a thread of its own, which knows what this one does."""
        worker = self._threads.take()
        task = Task(self.actor(name, self.me.release()), worker.baton, self.thing())
        self.touch(task.thing, "open")

        def run() -> None:
            try:
                if self.error is None:
                    self.touch(task.thing, "await")
                    job()
            except Aborted:
                pass
            except BaseException as error:  # noqa: BLE001  it is the run's
                self.fail(error)
            self.touch(task.thing, "open")
            self._tasks.remove(task)
            self._threads.give(worker)
            self._after(task)

        worker.job = run
        self._tasks.append(task)
        self._ready.append(task)

    def join_all(self) -> None:
        """The main thread waits until every other one has ended."""
        while len(self._tasks) > 1:
            self.block(self._joining, "the other threads to end")
        # Only now: that a thread had ended by chance would order nothing.
        for task in self._ended:
            self.me.follow(task.actor.clock)
            self.touch(task.thing, "await")
        self._ended.clear()

    def unwind(self) -> None:
        """The main thread lets every other one run to its end after a failure."""
        if len(self._tasks) > 1:
            self._give(self._tasks[1])
            self.main.baton.acquire()

    def _after(self, ended: Task) -> None:
        """A thread has ended: somebody else takes the baton."""
        self._ended.append(ended)
        self.wake(self._joining)
        following = self.main
        if self.error is None:
            try:
                following = self._next(may_stay=False)
            except BaseException as error:  # noqa: BLE001  nothing is left to do, or a step found a mistake
                self.fail(error)
        if self.error is not None:
            following = self._tasks[-1]
        self._give(following)

    def _switch(self, *, may_stay: bool) -> None:
        running = self.current
        try:
            following = self._next(may_stay=may_stay)
        except BaseException as error:
            self.fail(error)
            raise
        if following is not running:
            if may_stay:
                self._ready.append(running)
            self._give(following)
            running.baton.acquire()
            self.check()

    def _give(self, task: Task) -> None:
        self.current = task
        task.baton.release()

    def _next(self, *, may_stay: bool) -> Task:
        """Who runs next; what the device does before that is done here."""
        watched = self._chooser.watches
        running = self.current
        while True:
            self._steps_left -= 1
            if not self._steps_left:
                raise OrderError("stuck", f"no end after {MAX_STEPS} steps")
            self.end_turn()
            tasks = [running, *self._ready] if may_stay else self._ready
            options: list[Task | Step] = [task for task in tasks if task.gate is None or task.gate.open]
            stays = may_stay and bool(options) and options[0] is running
            if not self.timed:
                options += self.steps()
            if self._clock is not None and self._due():
                options.append(self._clock)
            if not options:
                self.let_time_pass()
                continue
            one = 0
            if watched or len(options) > 1:
                one = self._chooser.choose([option.actor for option in options], stays)
            picked = options[one]
            if isinstance(picked, Task):
                if picked is not running or not may_stay:
                    self._ready.remove(picked)
                return picked
            self.time += TICK_S
            picked.step()

    def now(self) -> float:
        """The time, for the running thread."""
        self.check()
        if self._clock is not None:
            self.touch(0, "look")
        return self.time

    def _due(self) -> bool:
        """Whether anything is, sooner or later."""
        while self._timers and self._timers[0][2].off:
            heappop(self._timers)
        return bool(self._timers)

    def let_time_pass(self) -> None:
        """The next that is due is, now."""
        if not self._due():
            raise OrderError("stuck", f"nothing is left that could happen: {self._who_waits()}")
        time, _, timer = heappop(self._timers)
        self.time = max(self.time, time)
        self.touch(0, "change")
        timer.then()

    def _who_waits(self) -> str:
        return "; ".join(f"{task.actor.name} waits for {task.waits_for}" for task in self._tasks)


class Failing:
    """A mistake found inside ends the run, whatever the code under test makes of the exception."""

    def __init__(self, host: Scheduler) -> None:
        self._host = host

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OrderError):
            self._host.fail(error)


class _Jump:
    """Time passes, as one more that may go on."""

    def __init__(self, host: Scheduler, actor: Actor) -> None:
        self.actor = actor
        self._host = host

    def step(self) -> None:
        self._host.let_time_pass()
