"""Every order in which a small run can go, one after another.

Two ways. `bounded` makes every choice that needs at most so many preemptions (somebody else comes in where the running
thread could have gone on), and assumes nothing. `reduced` has no bound, and leaves out what differs from an earlier run
only in the order of turns that have nothing to do with each other: those that touch no flag, lock, event or stream in
common, or only look at it (Flanagan and Godefroid, Dynamic Partial-Order Reduction for Model Checking Software, 2005,
with sleep sets). It takes the backend's calls and watched locks for all that threads share: where they race on plain
Python, only `bounded` looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvlane.policy.errors import InputError
from kvlane.streams.simulated.host import Touch
from kvlane.streams.simulated.order import Actor

Touched: TypeAlias = frozenset[Touch]


class Redundant(BaseException):
    """Whatever would follow has been in an earlier run, its turns in another order."""


class Bounded:
    """A chooser for `bounded`."""

    watches = False

    def __init__(self, preemptions: int) -> None:
        self._preemptions = preemptions
        self._left = preemptions
        self._path: list[tuple[int, int]] = []  # what was chosen, out of how many
        self._at = 0

    def choose(self, options: Sequence[Actor], may_stay: bool) -> int:
        if self._at == len(self._path):
            self._path.append((0, 1 if may_stay and not self._left else len(options)))
        one, _ = self._path[self._at]
        self._at += 1
        if may_stay and one:
            self._left -= 1
        return one

    def took(self, touched: Touched) -> None: ...

    def stall_s(self) -> float:
        return 0.0

    def back(self) -> bool:
        """Turn back to the last choice that has not been exhausted; False if there is none."""
        self._at, self._left = 0, self._preemptions
        while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
            self._path.pop()
        if not self._path:
            return False
        one, bound = self._path[-1]
        self._path[-1] = (one + 1, bound)
        return True


@dataclass(slots=True)
class _State:
    """A state on the path.

    Attributes:
        enabled: who could go on.
        asleep: those whose going first from here has been looked at, each with what its turn touches.
        wanted: those whose going first could make a difference.
        went: who did go.
        touched: what that turn touched.
    """

    enabled: list[int]
    asleep: dict[int, Touched]
    wanted: set[int]
    went: int
    touched: Touched = field(default=frozenset())

    def next(self) -> bool:
        """Somebody else goes first from here; False if that would show nothing new."""
        self.asleep[self.went] = self.touched
        for actor in self.enabled:
            if actor in self.wanted and actor not in self.asleep:
                self.went = actor
                return True
        return False


class Reduced:
    """A chooser for `reduced`."""

    watches = True

    def __init__(self) -> None:
        self._path: list[_State] = []
        self._at = 0

    def choose(self, options: Sequence[Actor], may_stay: bool) -> int:  # noqa: ARG002  the first one goes on anyway
        enabled = [actor.id for actor in options]
        if self._at == len(self._path):
            if self._path:
                # Whoever could have gone on and cannot any more: a wait that timed out, had it not been woken.
                last = self._path[-1]
                last.wanted.update(set(last.enabled) - set(enabled) - {last.went})
            asleep = self._asleep()
            awake = [actor for actor in enabled if actor not in asleep]
            if not awake:
                raise Redundant
            self._path.append(_State(enabled, asleep, {awake[0]}, awake[0]))
        state = self._path[self._at]
        self._at += 1
        return enabled.index(state.went)

    def _asleep(self) -> dict[int, Touched]:
        """Whoever slept before and has nothing to do with the turn just taken sleeps on."""
        if not self._path:
            return {}
        last = self._path[-1]
        return {
            actor: touched
            for actor, touched in last.asleep.items()
            if actor != last.went and not _dependent(touched, last.touched)
        }

    def took(self, touched: Touched) -> None:
        if self._at:
            self._path[self._at - 1].touched = touched

    def stall_s(self) -> float:
        return 0.0

    def back(self) -> bool:
        """Turn back to the last state from which somebody else should go first; False if there is none."""
        self._find_races()
        self._at = 0
        while self._path and not self._path[-1].next():
            self._path.pop()
        return bool(self._path)

    def _find_races(self) -> None:
        """Where two turns of the run could have come the other way round, somebody else is wanted before the first."""
        knows: dict[
            int, dict[int, int]
        ] = {}  # what each actor's last turn comes after: actors and their turns
        clocks: list[dict[int, int]] = []
        users: dict[int, list[int]] = {}  # turns that touched a thing
        for at, state in enumerate(self._path):
            before = knows.get(state.went, {})
            clock = dict(before)
            raced = -1
            for other in {other for touch in state.touched for other in users.get(touch.thing, ())}:
                first = self._path[other]
                if not _dependent(first.touched, state.touched):
                    continue
                if _race(first.touched, state.touched) and before.get(first.went, -1) < other:
                    raced = max(raced, other)
                for actor, turn in clocks[other].items():
                    clock[actor] = max(clock.get(actor, -1), turn)
            clock[state.went] = at
            clocks.append(clock)
            knows[state.went] = clock
            for touch in state.touched:
                users.setdefault(touch.thing, []).append(at)
            if raced >= 0:
                self._want(raced, at, clocks)

    def _want(self, first: int, second: int, clocks: list[dict[int, int]]) -> None:
        """Bring it about that the second turn, or something it comes after, may go before the first."""
        state, actor = self._path[first], self._path[second].went
        if actor in state.enabled:
            state.wanted.add(actor)
            return
        turns = range(first + 1, second)
        leads = [
            self._path[turn].went for turn in turns if clocks[second].get(self._path[turn].went, -1) >= turn
        ]
        found = next((lead for lead in leads if lead in state.enabled and lead != state.went), None)
        state.wanted.update(state.enabled if found is None else (found,))


_PASSIVE = frozenset({"look", "await"})
_HELD_UP = frozenset({"await", "take"})


def _dependent(one: Touched, other: Touched) -> bool:
    """Whether it makes a difference which of the two turns comes first."""
    return any(a.thing == b.thing and not {a.use, b.use} <= _PASSIVE for a in one for b in other)


def _race(first: Touched, second: Touched) -> bool:
    """Whether, besides, the second could have come first: not where the first is what let it go on."""
    return any(
        a.thing == b.thing and not {a.use, b.use} <= _PASSIVE and not (a.use == "open" and b.use in _HELD_UP)
        for a in first
        for b in second
    )


def bounded(run: Callable[[Bounded], None], preemptions: int, most: int) -> int:
    """Call `run` for every order with so few preemptions; returns how many there were.

    Raises:
        InputError: more than `most`.
    """
    chooser, runs = Bounded(preemptions), 0
    while True:
        run(chooser)
        runs += 1
        if not chooser.back():
            return runs
        _check(runs, most)


def reduced(run: Callable[[Reduced], None], most: int) -> tuple[int, int]:
    """Call `run` for every order that differs in more than the order of independent turns.

    Returns:
        How many there were, and how many more were begun and left off.

    Raises:
        InputError: more than `most` altogether.
    """
    chooser, whole, left = Reduced(), 0, 0
    while True:
        try:
            run(chooser)
            whole += 1
        except Redundant:
            left += 1
        if not chooser.back():
            return whole, left
        _check(whole + left, most)


def _check(runs: int, most: int) -> None:
    if runs >= most:
        raise InputError("most", f"{runs} runs were not all there are", "more, or a smaller case")
