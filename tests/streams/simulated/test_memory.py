"""Who has read and written which bytes, against a model that keeps books byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.simulated.memory import Block, Memory
from kvlane.streams.simulated.order import Access, Actor, OrderError
from kvlane.transfer.store import KvSafetyError

SIZE = 12
ACTORS = 3

spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)
uses = st.tuples(st.just("use"), st.integers(0, ACTORS - 1), spans, st.booleans())
meetings = st.tuples(st.just("meet"), st.integers(0, ACTORS - 1), st.integers(0, ACTORS - 1), st.none())


class Books:
    """For every byte its last write, and all reads since."""

    def __init__(self):
        self.writes = [None] * SIZE
        self.reads: list[list[Access]] = [[] for _ in range(SIZE)]

    def allows(self, actor, low, high, write):
        for at in range(low, high):
            earlier = [self.writes[at]] + (self.reads[at] if write else [])
            if any(access is not None and not actor.after(access) for access in earlier):
                return False
        return True

    def note(self, access, low, high, write):
        for at in range(low, high):
            if write:
                self.writes[at], self.reads[at] = access, []
            else:
                self.reads[at].append(access)


@given(st.lists(uses | meetings, max_size=40))
def test_a_race_is_found_when_there_is_one_and_only_then(steps):
    actors = [Actor(number, str(number)) for number in range(ACTORS)]
    block, books = Block("device", 0, SIZE), Books()
    for what, one, other, write in steps:
        actor = actors[one]
        if what == "meet":
            actor.follow(actors[other].release())
            continue
        low, high = other
        access = Access(actor, actor.epoch, "use")
        touch = block.write if write else block.read
        if books.allows(actor, low, high, write):
            touch(low, high, access)
            books.note(access, low, high, write)
        else:
            with pytest.raises(OrderError):
                touch(low, high, access)
            return


class TestFind:
    def test_a_view_is_found_where_it_lies(self):
        memory = Memory()
        blocks = [memory.add("host", size) for size in (5, 1, 300)]
        for block in blocks:
            for at in (0, block.data.size - 1):
                view = block.data[at:]
                for piece in (view, torch.from_numpy(view)):
                    assert memory.find(piece) == (block, at, block.data.size)
                    assert memory.find(piece).data.size == view.size

    def test_memory_of_nobody_is_an_error(self):
        memory = Memory()
        memory.add("host", 8)
        for other in (np.zeros(4, np.uint8), torch.zeros(4, dtype=torch.uint8)):
            with pytest.raises(KvSafetyError, match="no memory"):
                memory.find(other)
