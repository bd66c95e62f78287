"""Many passes priced at once cost what they cost one by one, whatever bounds what a layer attends."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlane.policy import PrefillCost, load_machine, load_model
from kvlane.policy.chunks import attention_flop_of_chunks, moved_tokens_of_chunks
from kvlane.policy.model_layer import Indexer, Latent, LatentCompute, LayerSpec
from kvlane.policy.prefill_cost import LayerwisePrefill

H100 = load_machine("h100-sxm")
# Layers of every kind that is not priced as one: windows, chunks, latents, indexers, states, experts.
MODELS = (
    "gemma-3-27b",
    "llama-4-scout",
    "deepseek-v3",
    "deepseek-v3.2",
    "qwen3-next-80b-a3b",
    "gpt-oss-20b",
)

widths = st.integers(1, 64)
latents = st.builds(
    Latent, widths, st.integers(0, 16), widths, widths, compute=st.sampled_from(get_args(LatentCompute))
)
bounds = st.integers(1, 3000)
windowed = st.builds(
    LayerSpec,
    st.just(8),
    st.just(2),
    widths,
    widths,
    st.just(1000),
    kind=st.sampled_from(["sliding_attention", "chunked_attention"]),
    window=bounds,
)
latent = st.builds(
    LayerSpec,
    st.just(8),
    st.just(1),
    widths,
    st.just(0),
    st.just(1000),
    kind=st.just("latent_attention"),
    latent=latents,
    indexer=st.none() | st.builds(Indexer, st.integers(0, 4), widths, bounds),
)
starts = st.just(0) | st.integers(0, 5000)


@given(layer=windowed | latent, resident=starts, chunk=st.integers(1, 700), count=st.integers(0, 60))
def test_passes_added_up_are_the_sum_of_each(layer: LayerSpec, resident: int, chunk: int, count: int) -> None:
    begins = range(resident, resident + chunk * count, chunk)
    assert moved_tokens_of_chunks(layer, resident, chunk, count) == sum(
        layer.moved_tokens(begin + chunk) for begin in begins
    )
    assert attention_flop_of_chunks(layer, resident, chunk, count) == pytest.approx(
        sum(layer.attention_flop(begin, chunk) for begin in begins), rel=1e-9
    )


def priced(model: str) -> PrefillCost:
    cost, _ = PrefillCost.from_profile(load_model(model), H100)
    assert isinstance(cost, LayerwisePrefill)
    return cost


@pytest.mark.parametrize("model", MODELS)
@given(resident=starts | st.integers(0, 200_000), new=st.integers(0, 100_000), chunk=st.integers(1, 9000))
def test_a_models_prefill_in_chunks_is_the_sum_of_its_passes(
    model: str, resident: int, new: int, chunk: int
) -> None:
    new = min(new, 60 * chunk)
    cost = priced(model)
    whole = sum(cost.pass_s(resident + begin, min(chunk, new - begin)) for begin in range(0, new, chunk))
    assert cost.prefill_s(resident, new, chunk) == pytest.approx(whole, rel=1e-9)


def test_both_ways_of_computing_latents_are_taken_where_they_are_cheaper() -> None:
    """So that the law above has seen passes of both kinds, the turn between them, and a bound beside it."""
    spec = load_model("deepseek-v3").layers[0]
    assert spec.latent is not None
    absorbed = [
        spec.attention_flop(begin, 160) == spec.latent.absorbed_flop(spec.heads) * spec.pairs(begin, 160)
        for begin in range(0, 160 * 40, 160)
    ]
    assert 0 < sum(absorbed) < len(absorbed)


def test_millions_of_tokens_in_small_chunks_take_no_more_work_than_a_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cost, asked = priced("gemma-3-27b"), []
    plain = LayerSpec.pairs

    def counted(layer: LayerSpec, resident: int, new: int) -> float:
        asked.append(new)
        return plain(layer, resident, new)

    monkeypatch.setattr(LayerSpec, "pairs", counted)
    cost.prefill_s(0, 3 * 64 + 1, 64)
    few = len(asked)
    cost.prefill_s(0, 16_000_001, 64)
    assert len(asked) == 2 * few
