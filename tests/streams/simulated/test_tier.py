"""What stands in for KV, and a tier that goes wrong when it is told to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.streams.simulated.backend import SimulatedBackend
from kvlane.streams.simulated.kv import PromptKv
from kvlane.streams.simulated.memory import POISON
from kvlane.streams.simulated.order import OrderError
from kvlane.streams.simulated.tier import Fault, LinkFaults, SimulatedTier, StoreBrokenError
from kvlane.transfer.identity import KvIdentity, encode_token_ids
from kvlane.transfer.layout import CopyDescriptor, KvLayout, KvRegion
from kvlane.transfer.shapes import LayerShape
from kvlane.transfer.store import ChecksumError, StaleHitError

LAYOUT = KvLayout(3, 1, 2, 2, 4)
REGION = KvRegion(LAYOUT, 16)
IDS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def prompt(ids, layout=LAYOUT):
    return PromptKv(encode_token_ids(ids), layout)


def rows(kv, layer, token):
    return [kv.block[part].tobytes() for part in kv.rows(layer, token, token + 1)]


class TestPromptKv:
    @given(one=IDS, other=IDS)
    def test_is_shared_by_prompts_as_far_as_they_agree_and_no_further(self, one, other):
        first, second = prompt(one), prompt(other)
        agree = True
        for token in range(min(len(one), len(other))):
            agree = agree and one[token] == other[token]
            for layer in range(LAYOUT.layers):
                assert (rows(first, layer, token) == rows(second, layer, token)) == agree

    def test_is_of_no_two_rows_alike(self):
        kv = prompt([5] * 16)
        found = [row for layer in range(3) for token in range(16) for row in rows(kv, layer, token)]
        assert len(set(found)) == len(found)

    def test_answers_differ_with_any_row_that_the_last_token_sees(self):
        window = LayerShape(1, 1, 1, 4, window=2)
        kv = prompt(range(6), KvLayout.of([LayerShape(1, 1, 1, 4), window]))
        for layer, token in ((0, 0), (0, 5), (1, 4), (1, 5)):
            for part in kv.rows(layer, token, token + 1):
                changed = kv.block.copy()
                changed[part] ^= 1
                assert kv.sum(layer, changed, 0) != kv.sum(layer, kv.block, 0)
        changed = kv.block.copy()
        changed[kv.rows(1, 3, 4)[0]] ^= 1
        assert kv.sum(1, changed, 0) == kv.sum(1, kv.block, 0)


@pytest.fixture
def tier():
    with SimulatedBackend() as backend:
        identity = KvIdentity("simulated", "r0", None, "bytes", LAYOUT.name, 0, 1, "none", "none")
        yield SimulatedTier(backend, "host", 4, identity)


def opened(tier, kv, fault=None):
    return tier.open(tier.lookup(kv), 0, 16, 16, fault)


class TestSimulatedTier:
    def test_holds_what_was_put(self, tier):
        kv = prompt(range(16))
        assert tier.put(kv) == 16
        with opened(tier, kv) as run:
            np.testing.assert_array_equal(run.memory, kv.block)
            assert run.tier == "host"

    def test_writes_over_what_it_lets_go_of_and_uses_it_again(self, tier):
        kv, other = prompt(range(16)), prompt(range(50, 66))
        tier.put(kv)
        with opened(tier, kv) as run:
            memory, hit = run.memory, tier.lookup(kv)
            assert tier.evict() == 1
            np.testing.assert_array_equal(memory, kv.block)
        assert tier.evict() == 0
        assert set(memory.tolist()) == {POISON}
        with pytest.raises(StaleHitError):
            tier.open(hit, 0, 16, 16)
        tier.put(other)
        np.testing.assert_array_equal(memory, other.block)

    def test_faults_strike_their_layer_only(self, tier):
        kv = prompt(range(16))
        tier.put(kv)
        with opened(tier, kv, Fault("raise", 1)) as run:
            run.copies(0, REGION)
            with pytest.raises(StoreBrokenError):
                run.copies(1, REGION)
        with opened(tier, kv, Fault("short", 1)) as run:
            moved = [sum(copy.nbytes for copy in run.copies(layer, REGION)) for layer in range(3)]
            assert moved[1] < run.layer_nbytes(1)
            assert moved[0] == run.layer_nbytes(0)
        with opened(tier, kv, Fault("unpinnable", 0)) as run, pytest.raises(StoreBrokenError):
            run.retain()
        with opened(tier, kv, Fault("rot", 2)) as run:
            run.verify(1)
            with pytest.raises(ChecksumError) as caught:
                run.verify(2)
            assert caught.value.layer == 2

    def test_a_stall_takes_its_time(self, tier):
        kv = prompt(range(16))
        tier.put(kv)
        with opened(tier, kv, Fault("stall", 1, 3.0)) as run:
            before = tier._backend.now()
            run.verify(0)
            assert tier._backend.now() == before
            run.verify(1)
            assert tier._backend.now() == before + 3.0

    def test_what_is_evicted_while_a_copy_reads_it_is_noticed(self):
        def careless():
            with SimulatedBackend() as backend:
                identity = KvIdentity("simulated", "r0", None, "bytes", LAYOUT.name, 0, 1, "none", "none")
                tier = SimulatedTier(backend, "host", 4, identity)
                kv = prompt(range(16))
                tier.put(kv)
                with opened(tier, kv) as run:
                    copies, memory = run.copies(0, REGION), run.memory
                events = backend.event(), backend.event()
                target = backend.device_bytes(REGION.nbytes)
                backend.copy(backend.stream("s"), target, memory, copies, backend.flag(), *events)
                tier.evict()

        with pytest.raises(OrderError, match="source_reused"):
            careless()


class TestLinkFaults:
    def test_strike_once_the_layer_on_the_tiers_stream(self):
        faults, batch = LinkFaults(), [CopyDescriptor(2, 0, 0, 1), CopyDescriptor(3, 0, 0, 1)]
        faults.arm("host", Fault("late", 3, 5.0))
        assert faults("copy-disk", batch) is None
        assert faults("copy-host", batch[:1]) is None
        struck = faults("copy-host", batch)
        assert struck is not None
        assert struck.late_s == 5.0
        assert faults("copy-host", batch) is None

    def test_fail_after_nothing_or_after_the_first_copy(self):
        for fault, copied in ((Fault("link", 0), 0), (Fault("torn", 0), 1)):
            faults = LinkFaults()
            faults.arm("host", fault)
            struck = faults("copy-host", [CopyDescriptor(0, 0, 0, 1)])
            assert struck is not None
            assert struck.copied == copied
            assert isinstance(struck.failure, StoreBrokenError)

    def test_may_be_taken_back(self):
        faults, fault = LinkFaults(), Fault("link", 0)
        faults.arm("host", fault)
        faults.disarm("host", fault)
        faults.disarm("host", fault)
        assert faults("copy-host", [CopyDescriptor(0, 0, 0, 1)]) is None
