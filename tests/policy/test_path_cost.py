"""The one-expression form of a load's TTFT says what the general one says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import Planner, Request, load_machine, load_model


def assert_bound_is_load_s(
    planner: Planner, tier: str, unit: int, chunk: int | None, start: int, end: int
) -> None:
    transfer = planner.transfer(tier, unit)
    bound = planner.cost.bound(transfer, chunk)
    for prompt in (end + 1, end + 7, end + 4000):
        general = planner.cost.load_s(transfer, start, end, prompt, chunk)
        assert bound(start, end, prompt) == pytest.approx(general, rel=1e-12)


@given(
    planner=st.from_type(Planner),
    tier=st.sampled_from(("host", "disk")),
    unit=st.sampled_from((1, 16, 256)),
    chunk=st.none() | st.sampled_from((1, 64, 2048)),
    start=st.integers(0, 5000),
    tokens=st.integers(1, 20_000),
)
def test_bound_is_load_s_on_any_machine(
    planner: Planner, tier: str, unit: int, chunk: int | None, start: int, tokens: int
) -> None:
    assert_bound_is_load_s(planner, tier, unit, chunk, start, start + tokens)


@pytest.mark.parametrize("executor", ["bulk", "layered"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-20b"])
def test_bound_is_load_s_of_built_in_models(executor: str, model: str) -> None:
    planner = Planner(load_model(model), load_machine("h100-sxm"), executor=executor)  # type: ignore[arg-type]
    for tier in ("host", "nvme"):
        for chunk in (None, 2048):
            assert_bound_is_load_s(planner, tier, 16, chunk, 512, 9000)


def test_a_planner_does_not_remember_every_load_unit_it_was_ever_asked_about() -> None:
    planner = Planner(load_model("llama-3.1-8b"), load_machine("h100-sxm"))
    for unit in range(1, 2000):
        planner.decide(Request(2000, {"host": 2000}, load_unit_tokens=unit))
    assert len(planner._transfers) <= 256
    assert len(planner._arrives) <= 256
