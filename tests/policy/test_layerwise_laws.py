"""What holds where layers differ, whatever they are: random mixes of kinds, links and requests."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlane.policy import (
    Device,
    Link,
    Machine,
    ModelSpec,
    Planner,
    PrefillEfficiency,
    Request,
    Tier,
    load_machine,
    load_model,
    model_names,
    pipeline,
)
from kvlane.policy.layer_transfer import LayerwiseTransfer
from kvlane.policy.model_layer import Experts, Indexer, Latent, LayerSpec, State
from kvlane.policy.pass_rates import PassRates
from kvlane.policy.planner import Calibration
from kvlane.policy.prefill_cost import PassCost, PrefillCost
from kvlane.policy.workload import pass_workload

STATE = State(
    heads=8,
    head_elements=256,
    element_bytes=4,
    groups=2,
    head_channels=16,
    group_channels=32,
    kernel=4,
    flop_per_token=1e5,
)
EXPERTS = Experts(count=16, active=2, weights=100_000)
FULL = LayerSpec(8, 2, 64, 64, 1_000_000)
KINDS = (
    FULL,
    replace(FULL, weights=2_000_000, k_width=96),
    replace(FULL, experts=EXPERTS),
    replace(FULL, stores_kv=False),
    LayerSpec(8, 4, 64, 64, 1_000_000, "sliding_attention", 128),
    LayerSpec(8, 4, 64, 64, 1_000_000, "chunked_attention", 512),
    LayerSpec(8, 1, 80, 0, 900_000, "latent_attention", latent=Latent(64, 16, 32, 32)),
    LayerSpec(
        8,
        1,
        80,
        0,
        900_000,
        "sparse_latent_attention",
        latent=Latent(64, 16, 32, 32),
        indexer=Indexer(4, 32, 256),
        experts=EXPERTS,
    ),
    LayerSpec(0, 0, 0, 0, 800_000, "feed_forward", experts=EXPERTS),
)
RECURRENT = LayerSpec(0, 0, 0, 0, 800_000, "linear_attention", state=STATE)


@st.composite
def models(draw: st.DrawFn, kinds: tuple[LayerSpec, ...] = (*KINDS, RECURRENT)) -> ModelSpec:
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    dtype = draw(st.sampled_from(("bf16", "fp8", "nvfp4")))
    kv_dtype = draw(st.sampled_from(("bf16", "fp8", "nvfp4", "fp8_per_token_head")))
    return ModelSpec("mixed", tuple(layers), 512, 1000, dtype, kv_dtype)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    table = draw(st.booleans())
    rate = 10.0 ** draw(st.floats(7, 11))
    link = Link(
        "link",
        rate,
        per_copy_s=0.0 if table else draw(st.sampled_from((0.0, 3e-6, 1e-4))),
        latency_s=draw(st.sampled_from((0.0, 1e-5, 1e-3))),
        rate_table=((4096, rate / 10), (1 << 20, rate)) if table else (),
    )
    tier = Tier(
        "host",
        "link",
        layout=draw(st.sampled_from(("layer_major", "chunk_major"))),
        run_tokens=draw(st.sampled_from((None, 0, 16))),
        runs_per_layer=draw(st.sampled_from((1, 2))),
    )
    return Machine(
        name="random",
        device=Device(
            "random",
            memory_bytes_per_s=10.0 ** draw(st.floats(9, 12.5)),
            peak_flops={"bf16": 10.0 ** draw(st.floats(10, 14))},
            interconnect_bytes_per_s=1e11,
            interconnect_latency_s=1e-5,
        ),
        links={"link": link},
        tiers={"host": tier},
        prefill=(PrefillEfficiency("vllm", "bf16", 0.5, 0.4, 1e-4, "profile", "drawn at random"),),
    )


@st.composite
def planners(draw: st.DrawFn, kinds: tuple[LayerSpec, ...] = (*KINDS, RECURRENT)) -> Planner:
    return Planner(
        draw(models(kinds)),
        draw(machines()),
        executor=draw(st.sampled_from(("bulk", "layered"))),
        tp=draw(st.sampled_from((1, 2, 4, 8))),
        tie_margin=draw(st.sampled_from((0.0, 0.03))),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    unit = draw(st.sampled_from((1, 16, 64)))
    prompt = draw(st.integers(2, 80 * unit))
    return Request(
        prompt_tokens=prompt,
        hits={"host": prompt - draw(st.just(0) | st.integers(0, prompt))},
        resident_tokens=draw(st.just(0) | st.integers(0, prompt - 1)),
        load_unit_tokens=unit,
        prefill_chunk_tokens=draw(st.none() | st.integers(max(1, prompt // 20), prompt)),
        state_checkpoints=tuple(draw(st.lists(st.integers(1, 80).map(lambda at: at * unit), max_size=4))),
    )


def transfer_of(planner: Planner, request: Request) -> LayerwiseTransfer:
    transfer = planner.transfer("host", request.load_unit_tokens)
    assert isinstance(transfer, LayerwiseTransfer)
    return transfer


def what_happens_s(planner: Planner, request: Request, start: int, end: int) -> float:
    """TTFT when `[start, end)` is loaded: each layer starts once its own KV is there and the one before is done."""
    prefill = planner.prefill
    loaded = end > start
    arrivals = [0.0] * planner.layers
    if loaded:
        transfer = planner.transfer("host", request.load_unit_tokens)
        arrivals = transfer.arrivals(end - start)
        if planner.executor == "bulk":
            arrivals = [transfer.total_s(end - start)] * planner.layers
    chunk = request.prefill_chunk_tokens or request.prompt_tokens
    at = max(end, start)
    first = min(chunk, request.prompt_tokens - at)
    done = 0.0
    for arrival, compute in zip(arrivals, prefill.layers_s(at, first), strict=True):
        done = max(done, arrival) + compute
    at += first
    while at < request.prompt_tokens:
        new = min(chunk, request.prompt_tokens - at)
        done += prefill.pass_s(at, new)
        at += new
    return done + prefill.head_s


@given(planner=planners(), request=requests())
@settings(max_examples=100, deadline=None)
def test_every_estimate_is_what_happens_layer_by_layer(planner: Planner, request: Request) -> None:
    for estimate in planner.decide(request).estimates.values():
        if estimate is None:
            continue
        start = request.resident_tokens
        end = estimate.end if estimate.load else start
        assert estimate.ttft_s == pytest.approx(what_happens_s(planner, request, start, end), rel=1e-9)


@given(planner=planners(), request=requests())
@settings(max_examples=100, deadline=None)
def test_the_plan_is_never_slower_than_a_pure_path_by_more_than_the_margin(
    planner: Planner, request: Request
) -> None:
    plan = planner.decide(request)
    for path in ("load", "recompute"):
        estimate = plan.estimates[path]
        if estimate is not None:
            assert plan.ttft_s <= estimate.ttft_s * (1 + planner.tie_margin)


@given(planner=planners(KINDS), request=requests())
@settings(max_examples=60, deadline=None)
def test_the_split_found_is_close_to_the_best_there_is(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    split, unit = plan.estimates["split"], request.load_unit_tokens
    start = request.resident_tokens
    usable = min(request.hit("host"), request.prompt_tokens - 1) // unit * unit
    ends = range((start // unit + 1) * unit, usable, unit)
    if split is None:
        assert not ends
        return
    assert split.end in ends
    best = min(what_happens_s(planner, request, start, end) for end in ends)
    recompute = plan.estimates["recompute"]
    assert recompute is not None
    # A grid may miss a narrow dip; what it misses is a small part of what there is to decide about.
    assert split.ttft_s <= best * 1.10


@given(planner=planners((*KINDS[:4], RECURRENT)), request=requests())
@settings(max_examples=60, deadline=None)
def test_recurrent_layers_load_only_up_to_a_checkpoint(planner: Planner, request: Request) -> None:
    if not planner.model.recurrent:
        return
    plan = planner.decide(request)
    unit = request.load_unit_tokens
    stored = min(request.hit("host"), request.prompt_tokens - 1) // unit * unit
    usable = [at for at in request.checkpoints("host") if request.resident_tokens < at <= stored]
    load, split = plan.estimates["load"], plan.estimates["split"]
    if not usable:
        assert load is None
        assert split is None
        assert plan.path == "recompute"
        assert plan.unavailable["load"]
        return
    assert load is not None
    assert load.end == max(usable)
    assert (split is None) == (len(set(usable)) == 1)
    assert split is None or split.end in usable
    # One snapshot is moved, whatever the tokens.
    state, per_token = planner.model.state_bytes(planner.tp), 0.0
    per_token = planner.model.kv_bytes_per_token(tp=planner.tp)
    assert load.load_bytes == round(state + per_token * load.load_tokens)


@given(model=models(), tokens=st.integers(0, 5000), tp=st.sampled_from((1, 2, 4, 8)))
def test_what_moves_is_never_more_than_what_is_reserved(model: ModelSpec, tokens: int, tp: int) -> None:
    move, reserve = model.move_bytes(tokens, tp=tp), model.reserve_bytes(tokens, tp=tp)
    assert model.state_bytes(tp) <= move <= reserve
    assert model.move_bytes(tokens + 1, tp=tp) >= move
    # Over all ranks nothing shrinks by being divided, and no rank holds more than the whole.
    assert move <= model.move_bytes(tokens) <= move * tp * (1 + 1e-12)


@given(planner=planners(), request=requests(), tokens=st.integers(1, 5000))
@settings(deadline=None)
def test_a_load_moves_the_model_s_bytes_and_its_indexer_s(
    planner: Planner, request: Request, tokens: int
) -> None:
    model = planner.model
    moved = model.move_bytes(tokens, tp=planner.tp) + tokens * model.indexer_bytes_per_token
    transfer = planner.transfer("host", request.load_unit_tokens)
    assert transfer.bytes(tokens) == pytest.approx(moved)
    if isinstance(transfer, LayerwiseTransfer):
        parts = transfer.layers_s(tokens)
        assert transfer.total_s(tokens) == pytest.approx(transfer.link.latency_s + sum(parts))
        if transfer.by_layer:
            # A layer that nothing is moved for is not waited for, wherever it stands.
            moving = set(transfer.moving(tokens))
            assert transfer.arrivals(tokens) == pytest.approx(
                [
                    transfer.link.latency_s + part if layer in moving else 0.0
                    for layer, part in enumerate(accumulate(parts))
                ]
            )
            assert transfer.fixed_until(tokens)[-1] == pytest.approx(transfer.fixed_s(tokens))
        assert (
            transfer.total_s(tokens) <= transfer.total_s(tokens + 500) * (1 + 1e-9) or not transfer.by_layer
        )


@given(planner=planners(), resident=st.integers(0, 5000), new=st.integers(1, 5000))
@settings(deadline=None)
def test_no_pass_beats_the_peak_or_the_memory(planner: Planner, resident: int, new: int) -> None:
    model, device = planner.model, planner.machine.device
    seconds = planner.prefill.pass_s(resident, new) + planner.prefill.head_s
    assert device.memory_bytes_per_s is not None
    peak = max(device.peak_flops.values()) * planner.tp
    assert seconds >= model.prefill_flop(resident, new) / peak
    assert seconds >= model.touched_weight_bytes(new) / (device.memory_bytes_per_s * planner.tp)
    assert sum(planner.prefill.layers_s(resident, new)) == pytest.approx(
        planner.prefill.pass_s(resident, new)
    )


@given(
    layers=st.integers(1, 40),
    machine=machines(),
    request=requests(),
    executor=st.sampled_from(("bulk", "layered")),
)
@settings(deadline=None)
def test_layers_all_alike_cost_the_same_one_by_one(
    layers: int, machine: Machine, request: Request, executor: str
) -> None:
    # An indexer that picks more than there is and costs nothing to ask makes a plain layer not plain.
    plain = ModelSpec("plain", (FULL,) * layers, 512, 1000, "bf16", "bf16")
    odd = replace(FULL, window=1 << 24, kind="sliding_attention")
    unlike = ModelSpec("windowed beyond reach", (odd,) * layers, 512, 1000, "bf16", "bf16")
    uniform = Planner(plain, machine, executor=executor, tie_margin=0.0)  # type: ignore[arg-type]
    layerwise = Planner(unlike, machine, executor=executor, tie_margin=0.0)  # type: ignore[arg-type]
    assert isinstance(layerwise.transfer("host", 16), LayerwiseTransfer)
    one, other = uniform.decide(request), layerwise.decide(request)
    for path in ("load", "recompute"):
        first, second = one.estimates[path], other.estimates[path]
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.ttft_s == pytest.approx(second.ttft_s, rel=1e-9)
            assert first.load_bytes == second.load_bytes


@given(planner=planners(KINDS), request=requests())
@settings(max_examples=60, deadline=None)
def test_at_the_break_even_rate_loading_everything_ties(planner: Planner, request: Request) -> None:
    plan = planner.decide(request)
    rate = plan.break_even_bytes_per_s
    if rate is None or not 1.0 < rate < 1e18:
        return
    link = replace(planner.machine.links["link"], rate_bytes_per_s=rate, rate_table=())
    tied = Planner(
        planner.model,
        replace(planner.machine, links={"link": link}),
        executor=planner.executor,
        tp=planner.tp,
    ).decide(request)
    load, recompute = tied.estimates["load"], tied.estimates["recompute"]
    assert load is not None
    assert recompute is not None
    assert load.ttft_s == pytest.approx(recompute.ttft_s, rel=1e-6)


def test_a_measured_pass_divides_over_unlike_layers_as_their_flop_do() -> None:
    small, large = FULL, replace(FULL, weights=3_000_000)
    model = ModelSpec("two kinds", (small, large, large), 512, 1000, "bf16", "bf16")
    cost = PassCost(overhead_s=0.0, token_s=1e-5, pair_s=0.0)
    machine = Machine("m", Device("d"), {"link": Link("link", 1e9)}, {"host": Tier("host", "link")}, ())
    planner = Planner(
        model,
        machine,
        executor="layered",
        calibration=Calibration(PrefillCost(3, cost, cost), 0.01, "measured"),
    )
    parts = planner.prefill.layers_s(0, 100)
    assert sum(parts) == pytest.approx(1e-3)
    assert parts[1] / parts[0] == pytest.approx(large.flop(0, 100) / small.flop(0, 100))


@given(
    arrivals=st.lists(st.floats(0, 10), min_size=1, max_size=20),
    computes=st.lists(st.floats(0, 10), min_size=20, max_size=20),
)
def test_recurrence_and_closed_form_agree(arrivals: list[float], computes: list[float]) -> None:
    computes = computes[: len(arrivals)]
    arrivals = sorted(arrivals)
    assert pipeline.closed_form(arrivals, computes) == pytest.approx(
        pipeline.recurrence(arrivals, computes)[-1]
    )


@given(
    name=st.sampled_from(model_names()),
    machine=st.sampled_from(("h100-sxm",)),
    resident=st.just(0) | st.integers(0, 50_000),
    new=st.integers(1, 50_000),
    tp=st.sampled_from((1, 2, 4, 8)),
)
@settings(deadline=None)
def test_a_profile_s_pass_is_the_time_of_its_work(
    name: str, machine: str, resident: int, new: int, tp: int
) -> None:
    # The rates fitted to published prefills price a decision too, layer by layer.
    model, where = load_model(name), load_machine(machine)
    tp = gcd(tp, *(layer.heads for layer in model.layers))
    cost, row = PrefillCost.from_profile(model, where, tp=tp)
    dtype = {"nvfp4": "fp4", "mxfp4": "fp4"}.get(model.weight_dtype, model.weight_dtype)
    work = pass_workload(model, resident, new, tp=tp)
    seconds = PassRates.of(where, row, dtype, tp=tp).seconds(work)
    assert cost.pass_s(resident, new) + cost.head_s == pytest.approx(seconds)
    chunk = max(1, new // 3)
    assert cost.prefill_s(resident, new, chunk) == pytest.approx(
        sum(cost.pass_s(resident + at, min(chunk, new - at)) for at in range(0, new, chunk))
    )
