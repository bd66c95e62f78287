"""What a link achieves at a copy size, and what its transfers of KV cost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvlane.policy import InputError, Link, Tier
from kvlane.policy.transfer_cost import TransferCost

NAN, INF = float("nan"), float("inf")
TABLE = ((4096.0, 1e9), (65536.0, 10e9), (2.0**20, 50e9))
sizes = st.floats(0, 10).map(lambda exponent: 10.0**exponent)
links = st.from_type(Link)


@st.composite
def transfers(draw: st.DrawFn) -> TransferCost:
    return TransferCost(
        link=draw(links),
        layers=draw(st.sampled_from((1, 2, 32))),
        layer_bytes_per_token=draw(st.sampled_from((64.0, 4096.0))),
        run_tokens=draw(st.sampled_from((None, 1, 16, 256))),
        runs_per_layer=draw(st.sampled_from((1, 2))),
        layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
    )


def test_a_flat_rate_holds_at_every_size() -> None:
    link = Link("x", 25e9)
    assert {link.rate_at(size) for size in (1, 4096, 1e12)} == {25e9}


def test_a_table_gives_its_rows_and_holds_its_last_rate_beyond_them() -> None:
    link = Link("x", 50e9, rate_table=TABLE)
    for size, rate in TABLE:
        assert link.rate_at(size) == pytest.approx(rate)
    assert link.rate_at(2.0**30) == 50e9


@given(size=st.floats(1, 4096))
def test_below_the_first_row_a_copy_takes_as_long_as_that_row(size: float) -> None:
    # The call overhead is the floor: a smaller copy is no sooner done.
    link = Link("x", 50e9, rate_table=TABLE)
    assert size / link.rate_at(size) == pytest.approx(4096 / 1e9)


@given(link=links, first=sizes, second=sizes)
def test_a_larger_copy_moves_at_no_lower_rate_and_is_done_no_sooner(
    link: Link, first: float, second: float
) -> None:
    small, large = sorted((first, second))
    assert link.rate_at(small) <= link.rate_at(large) * (1 + 1e-9)
    assert small / link.rate_at(small) <= large / link.rate_at(large) * (1 + 1e-9)


@given(link=links, share=st.floats(0, 1), data=st.data())
def test_between_two_rows_time_per_copy_is_linear(link: Link, share: float, data: st.DataObject) -> None:
    assume(len(link.rate_table) > 1)
    row = data.draw(st.integers(0, len(link.rate_table) - 2))
    (low, low_rate), (high, high_rate) = link.rate_table[row : row + 2]
    size = low + share * (high - low)
    line = (1 - share) * low / low_rate + share * high / high_rate
    assert size / link.rate_at(size) == pytest.approx(line, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("rate", {"rate_bytes_per_s": 0.0}),
        ("rate", {"rate_bytes_per_s": -1.0}),
        ("rate", {"rate_bytes_per_s": NAN}),
        ("rate", {"rate_bytes_per_s": INF}),
        ("per_copy", {"per_copy_s": -1e-6}),
        ("per_copy", {"per_copy_s": NAN}),
        ("per_copy", {"per_copy_s": 1e-6, "rate_table": TABLE}),
        ("latency", {"latency_s": -1e-6}),
        ("latency", {"latency_s": INF}),
        ("per_event", {"per_event_s": -1e-6}),
        ("first_use", {"first_use_s": NAN}),
        ("rate_table", {"rate_table": TABLE[::-1]}),
        ("rate_table", {"rate_table": (TABLE[0], TABLE[0])}),
        ("rate_table", {"rate_table": ((4096.0, 0.0),)}),
        ("rate_table", {"rate_table": ((-1.0, 1e9),)}),
        ("rate_table", {"rate_table": ((4096.0, NAN),)}),
        ("rate_table", {"rate_table": ((4096.0, INF),)}),
        ("rate_table", {"rate_table": ((NAN, 1e9),)}),
        ("rate_table", {"rate_table": ((4096.0, 1e9), (INF, 2e9))}),
    ],
)
def test_a_link_that_cannot_be_is_refused_by_field(field: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        Link(**{"name": "pcie", "rate_bytes_per_s": 1e9, **bad})
    assert caught.value.field == f"links.pcie.{field}"


def test_the_published_cost_of_small_copies(shared: Path) -> None:
    known = json.loads((shared / "known_answers.json").read_text())["small_copies"]
    link = Link("x", known["rate_bytes_per_s"], per_copy_s=known["per_copy_s"])
    tokens = known["bytes"] // known["copy_bytes"]
    paged = TransferCost(link, 1, known["copy_bytes"], run_tokens=1)
    assert paged.bytes(tokens) == known["bytes"]
    assert paged.copies(tokens) == known["copies"]
    assert paged.total_s(tokens) == pytest.approx(known["seconds"], rel=1e-5)
    # The same bytes in one run cost what the rate says and one call.
    contiguous = replace(paged, run_tokens=None)
    assert contiguous.copies(tokens) == 1
    assert contiguous.total_s(tokens) == pytest.approx(
        known["per_copy_s"] + known["bytes"] / known["rate_bytes_per_s"]
    )


@pytest.mark.parametrize(("tokens", "copies"), [(1, 2), (16, 2), (17, 4), (160, 20)])
def test_paged_kv_takes_a_copy_for_every_run_begun(tokens: int, copies: int) -> None:
    link = Link("x", 1e9)
    tier = Tier("host", "x", run_tokens=0, runs_per_layer=2)
    paged = TransferCost.of_tier(tier, link, 4, 128.0, load_unit_tokens=16)
    assert paged.copies(tokens) == copies
    assert TransferCost.of_tier(replace(tier, run_tokens=16), link, 4, 128.0, 999).copies(tokens) == copies
    assert TransferCost.of_tier(replace(tier, run_tokens=None), link, 4, 128.0, 16).copies(tokens) == 2


@given(transfer=transfers(), tokens=st.integers(1, 5000))
def test_a_transfer_is_its_latency_its_copies_and_its_bytes(transfer: TransferCost, tokens: int) -> None:
    link = transfer.link
    # In a chunk-major store one copy carries all layers of a run; in a layer-major one each layer has its own.
    rounds = 1 if transfer.layout == "chunk_major" else transfer.layers
    runs = 1 if transfer.run_tokens is None else -(-tokens // transfer.run_tokens)
    copies = runs * transfer.runs_per_layer * rounds
    moved = tokens * transfer.layer_bytes_per_token * transfer.layers
    seconds = link.latency_s + copies * link.per_copy_s + moved / link.rate_at(moved / copies)
    assert transfer.bytes(tokens) == moved
    assert transfer.total_s(tokens) == pytest.approx(seconds, rel=1e-9)
    if not link.rate_table:
        flat = moved / link.rate_bytes_per_s
        assert transfer.fixed_s(tokens) == pytest.approx(seconds - flat, rel=1e-6, abs=1e-9 * seconds)


@given(transfer=transfers(), tokens=st.integers(1, 5000))
def test_layers_arrive_in_order_and_the_last_ends_the_transfer(transfer: TransferCost, tokens: int) -> None:
    arrivals = transfer.arrivals(tokens)
    assert len(arrivals) == transfer.layers
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(transfer.done_s(tokens, 1), rel=1e-9)
    events = transfer.layers * transfer.link.per_event_s if transfer.by_layer else 0.0
    assert transfer.done_s(tokens, 1) == pytest.approx(transfer.total_s(tokens) + events)
    if transfer.layout == "chunk_major":
        # Whole chunks arrive, so no layer is complete before the last chunk is.
        assert len(set(arrivals)) == 1
    elif transfer.layers > 1:
        assert arrivals[0] < arrivals[-1]


@given(transfer=transfers(), tokens=st.integers(0, 5000))
def test_one_more_token_never_takes_less(transfer: TransferCost, tokens: int) -> None:
    assert transfer.total_s(tokens) <= transfer.total_s(tokens + 1) * (1 + 1e-9)


@given(transfer=transfers())
def test_nothing_to_move_costs_nothing(transfer: TransferCost) -> None:
    assert transfer.total_s(0) == 0
    assert transfer.layer_s(0) == 0
    assert transfer.arrivals(0) == [0.0] * transfer.layers


@given(link=links, size=sizes)
def test_a_link_supposed_at_its_own_rate_is_the_same(link: Link, size: float) -> None:
    same = link.at_rate(link.rate_bytes_per_s)
    if any(rate > link.rate_bytes_per_s for _, rate in link.rate_table):
        return  # a row above the link's own rate has nothing beside its bytes to keep
    assert same.rate_at(size) == pytest.approx(link.rate_at(size), rel=1e-9)
    assert same.achieved(size) == pytest.approx(link.achieved(size), rel=1e-9)
    assert (same.latency_s, same.per_event_s, same.first_use_s) == (
        link.latency_s,
        link.per_event_s,
        link.first_use_s,
    )


@given(link=links, size=sizes, factor=st.floats(1.001, 100))
def test_a_link_supposed_faster_brings_no_copy_later(link: Link, size: float, factor: float) -> None:
    faster = link.at_rate(link.rate_bytes_per_s * factor)
    assert faster.achieved(size) >= link.achieved(size) * (1 - 1e-9)


def test_in_a_table_what_a_copy_takes_beside_its_bytes_stays() -> None:
    link = Link("x", 50e9, rate_table=TABLE)
    beside_s = [size / link.rate_at(size) - size / 50e9 for size, _ in TABLE]
    slow = link.at_rate(1e9)
    assert [size / slow.rate_at(size) - size / 1e9 for size, _ in TABLE] == pytest.approx(beside_s)
    assert (slow.source, slow.rate_bytes_per_s) == ("explicit", 1e9)
