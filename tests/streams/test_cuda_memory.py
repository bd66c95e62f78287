"""Page-locking by a runtime that records what it is asked, and refuses on demand."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.cuda_memory import CHUNK_BYTES, PinError, PinnedMemory, chunks

KIB = 1024


class Runtime:
    """Locks any pages but those of the registration with this number."""

    def __init__(self, refused=None):
        self.refused = refused
        self.held = {}
        self.asked = 0

    def register(self, address, nbytes):
        number, self.asked = self.asked, self.asked + 1
        if number == self.refused:
            return 2
        assert not any(a < address + nbytes and address < a + n for a, n in self.held.items()), "locked twice"
        self.held[address] = nbytes
        return 0

    def unregister(self, address):
        return 0 if self.held.pop(address, None) else 713

    def describe(self, code):
        return f"error {code}"


class TestChunks:
    @given(st.integers(0, 1 << 40), st.integers(0, 1 << 42), st.integers(1 << 30, 1 << 35))
    def test_cover_every_byte_once(self, address, nbytes, chunk_bytes):
        made = list(chunks(address, nbytes, chunk_bytes))
        assert sum(chunk.nbytes for chunk in made) == nbytes
        at = address
        for chunk in made:
            assert chunk.address == at
            assert 0 < chunk.nbytes <= chunk_bytes
            at = chunk.end

    def test_512_gib_are_not_one_registration(self):
        made = list(chunks(0, 512 << 30))
        assert len(made) == 64
        assert {chunk.nbytes for chunk in made} == {CHUNK_BYTES}


class TestPinnedMemory:
    def test_is_exactly_as_long_as_asked_for_and_locked_whole(self):
        runtime = Runtime()
        pinned = PinnedMemory(runtime, chunk_bytes=8 * KIB)
        memory = pinned.allocate(20 * KIB + 1)
        assert memory.size == 20 * KIB + 1
        assert sorted(runtime.held.values()) == [4 * KIB + 1, 8 * KIB, 8 * KIB]
        assert pinned.nbytes == 20 * KIB + 1
        assert memory.ctypes.data in runtime.held

    @pytest.mark.parametrize("refused", [0, 1, 2])
    def test_a_refusal_lets_go_of_what_was_locked_before_it(self, refused):
        runtime = Runtime(refused)
        pinned = PinnedMemory(runtime, chunk_bytes=8 * KIB)
        with pytest.raises(PinError, match=r"of 20480 bytes.*error 2"):
            pinned.allocate(20 * KIB)
        assert runtime.asked == refused + 1
        assert not runtime.held
        assert pinned.nbytes == 0

    def test_stays_locked_until_the_last_view_goes(self):
        runtime = Runtime()
        pinned = PinnedMemory(runtime, chunk_bytes=8 * KIB)
        memory = pinned.allocate(12 * KIB)
        part = memory[100:200][10:]
        del memory
        gc.collect()
        assert len(runtime.held) == 2
        del part
        gc.collect()
        assert not runtime.held
        assert pinned.nbytes == 0

    def test_boundaries_are_where_registrations_meet_inside_a_view(self):
        pinned = PinnedMemory(Runtime(), chunk_bytes=8 * KIB)
        memory = pinned.allocate(20 * KIB)
        assert pinned.boundaries(memory) == [8 * KIB, 16 * KIB]
        assert pinned.boundaries(memory[4 * KIB : 12 * KIB]) == [4 * KIB]
        assert pinned.boundaries(memory[8 * KIB : 16 * KIB]) == []

    def test_memory_of_another_origin_is_not_locked(self):
        pinned = PinnedMemory(Runtime(), chunk_bytes=8 * KIB)
        kept = pinned.allocate(8 * KIB)
        assert pinned.boundaries(np.zeros(8 * KIB, np.uint8)) is None
        # Views of the same allocation, but of the bytes before what was locked.
        assert pinned.boundaries(np.asarray(kept.base)) is None
