"""Draws a schedule from a seed: a model, links, prompts, plans, faults, and how threads take turns."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

from kvlane.streams.executor import DEFAULT_DEADLINE_S, Mode
from kvlane.streams.prefill import OnFailure
from kvlane.streams.simulated.backend import ANY, HostCosts
from kvlane.streams.simulated.host import TICK_S
from kvlane.streams.simulated.links import SimulatedLink
from kvlane.streams.simulated.tier import FAULTS, Fault
from kvlane.transfer.layout import KvLayout
from kvlane.transfer.paged import BlockForm, First, Kv, Order
from kvlane.transfer.shapes import LayerShape

LAYER_S = 1e-3
"""About what a layer of the longest prompt takes to compute."""

MOST_TOKENS = 24
TIERS = ("host", "disk")

PlanKind: TypeAlias = Literal["recompute", "load", "two_tiers", "two_ended", "two_ended_tiers"]


@dataclass(frozen=True, slots=True)
class RequestDraw:
    """One request. Shares are of what is there when its turn comes.

    Attributes:
        prompt: which of the schedule's.
        resident: share, 0 to 1, of what the sequence could go on from that it does go on from.
        loaded: share of what is stored that is loaded.
        seam: where in that a plan of two pieces is cut.
        fault: what goes wrong, in the last run of the load.
        cancel_after: when it is called off, in seconds, or in turns without a clock; None for never.
        store_first: whether its prompt is stored before, where it is not.
    """

    prompt: int
    plan: PlanKind
    mode: Mode
    group_layers: int
    resident: float
    loaded: float
    seam: float
    tiers: tuple[str, str]
    deadline_s: float
    fault: Fault | None
    cancel_after: float | None
    on_failure: OnFailure
    store_first: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that decides a run: equal seeds draw equal schedules, and those run alike.

    Attributes:
        paged: how device blocks lie in their pool; None for contiguous memory.
        prompts: token ids; they share prefixes.
        checkpoints: token counts at which states are stored.
        links: see `SimulatedBackend`.
        compute_s: of each layer for the longest prompt; fewer tokens take their share.
        switch: see `Seeded`.
        stall: see `Seeded`.
        requests: one row for every sequence, each on a thread of its own.
        evictions: pauses, in seconds or turns, after each of which everything unpinned is evicted.
    """

    seed: int
    layout: KvLayout
    paged: BlockForm | None
    unit_tokens: int
    prompts: tuple[tuple[int, ...], ...]
    checkpoints: tuple[int, ...]
    links: dict[str, SimulatedLink]
    compute: Literal["thread", "stream"]
    timed: bool
    switch: float
    stall: float
    costs: HostCosts
    compute_s: tuple[float, ...]
    before_share: float
    ring_sets: int
    quarantine_blocks: int
    requests: tuple[tuple[RequestDraw, ...], ...]
    evictions: tuple[float, ...]

    def seconds(self, layer: int, start: int, end: int) -> float:
        """What a layer's compute takes for some tokens."""
        return self.compute_s[layer] * (end - start) / MOST_TOKENS

    def pass_s(self, tokens: int) -> float:
        return sum(self.compute_s) * tokens / MOST_TOKENS

    def __str__(self) -> str:
        counts = "+".join(str(len(requests)) for requests in self.requests)
        where = "contiguous" if self.paged is None else str(self.paged)
        lines = [
            f"seed {self.seed}: {self.layout.name}, {where}, {counts} requests, compute on a {self.compute},"
            f" {'timed' if self.timed else 'untimed'}, switch {self.switch:.2f}, stall {self.stall:.2f},"
            f" ring {self.ring_sets}, quarantine {self.quarantine_blocks}, links {self.links}"
        ]
        for sequence, requests in enumerate(self.requests):
            lines += [f"  sequence {sequence}: {request}" for request in requests]
        return "\n".join(lines)


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    random = Random(seed)
    layout = _layout(random, _layers(random))
    timed = random.random() < 0.75
    prompts = _prompts(random)
    sequences = 2 if random.random() < 0.25 else 1
    most = 4 if layout.layers <= 16 else 2
    compute = random.choice((0.1, 1.0, 1.0, 4.0)) * LAYER_S
    unit = random.choice((3, 4, 6, 8))
    costly = random.random() < 0.3
    return Schedule(
        seed=seed,
        layout=layout,
        paged=_form(random) if random.random() < 0.4 else None,
        unit_tokens=unit,
        prompts=prompts,
        checkpoints=tuple(sorted(random.sample(range(unit, MOST_TOKENS, unit), 2))),
        links=_links(random, layout),
        compute=random.choice(("thread", "stream")),
        timed=timed,
        switch=random.choice((0.02, 0.1, 0.3, 0.7)) if layout.layers <= 40 else 0.05,
        stall=random.choice((0.0, 0.0, 0.02, 0.1)) if timed else 0.0,
        costs=HostCosts(2e-6, 5e-6, 1e-6) if costly else HostCosts(),
        compute_s=tuple(compute * random.uniform(0.5, 1.5) for _ in range(layout.layers)),
        before_share=random.choice((0.0, 0.0, 0.4)),
        ring_sets=random.choice((1, 2, 3, 3)),
        quarantine_blocks=random.choice((1, 2, 3)),
        requests=tuple(
            tuple(
                _request(random, layout, len(prompts), timed, alone=sequences == 1)
                for _ in range(random.randint(1, most))
            )
            for _ in range(sequences)
        ),
        evictions=tuple(_pause(random, layout, timed) for _ in range(random.choice((0, 0, 0, 1, 3)))),
    )


def _layers(random: Random) -> int:
    kind = random.random()
    if kind < 0.70:
        return random.randint(1, 5)
    if kind < 0.92:
        return random.randint(6, 14)
    return random.randint(15, 40) if kind < 0.985 else random.randint(41, 128)


def _layout(random: Random, layers: int) -> KvLayout:
    rows = LayerShape(random.choice((1, 2)), random.choice((1, 2)), random.choice((1, 2)), 4)
    window = LayerShape(rows.kv_heads, rows.k_width, rows.v_width, 4, window=random.randint(1, 8))
    latent = LayerShape(1, 3, 0, 2)
    nothing = LayerShape()
    state = LayerShape(state_bytes=random.choice((8, 12)))
    mix = random.choices(
        ((rows,), (rows, window), (rows, nothing), (latent,), (rows, state, nothing)), (60, 15, 10, 5, 10)
    )[0]
    shapes = [random.choice(mix) for _ in range(layers)]
    shapes[random.randrange(layers)] = mix[0]  # at least one layer has something to load
    return KvLayout.of(shapes)


def _form(random: Random) -> BlockForm:
    first: First = random.choice(get_args(First))
    kv: Kv = random.choice([kv for kv in get_args(Kv) if first == "layer" or kv != "apart"])
    return BlockForm(random.choice((4, 8)), first, random.choice(get_args(Order)), kv)


def _prompts(random: Random) -> tuple[tuple[int, ...], ...]:
    base = [random.randrange(1000) for _ in range(MOST_TOKENS)]
    prompts = []
    for number in range(random.randint(1, 3)):
        shared, tokens = random.randint(0, MOST_TOKENS), random.randint(6, MOST_TOKENS)
        prompts.append(tuple((base[:shared] + [1000 + number] * MOST_TOKENS)[:tokens]))
    return tuple(prompts)


def _links(random: Random, layout: KvLayout) -> dict[str, SimulatedLink]:
    def link(sharing: Literal["exclusive", "fair"]) -> SimulatedLink:
        layer_bytes = max(1.0, layout.bytes_per_token / layout.layers) * MOST_TOKENS
        return SimulatedLink(
            layer_bytes / (LAYER_S * 10 ** random.uniform(-1.2, 0.7)),
            random.choice((0.0, 0.02 * LAYER_S)),
            random.choice((0.0, 0.3 * LAYER_S)),
            sharing=sharing,
        )

    if random.random() < 0.3:
        return {ANY: link(random.choice(("exclusive", "fair")))}
    return {f"copy-{tier}": link("exclusive") for tier in TIERS}


def _request(random: Random, layout: KvLayout, prompts: int, timed: bool, *, alone: bool) -> RequestDraw:
    deadline = DEFAULT_DEADLINE_S
    if random.random() < 0.2:
        short = layout.layers * LAYER_S * 10 ** random.uniform(-1.5, 0.5)
        deadline = short if timed else TICK_S * random.randint(5, 40 * layout.layers)
    return RequestDraw(
        prompt=random.randrange(prompts),
        plan=random.choices(get_args(PlanKind), (1, 4, 3, 3, 1))[0],
        mode=random.choice(("layered", "layered", "bulk")),
        group_layers=random.choice((1, 1, 2, 3, layout.layers)),
        resident=random.choice((0.0, 0.5, 1.0)),
        loaded=random.choice((1.0, 1.0, random.random())),
        seam=random.random(),
        tiers=random.choice((("host", "disk"), ("disk", "host"), ("host", "host"))),
        deadline_s=deadline,
        fault=_fault(random, layout, deadline, alone) if random.random() < 0.35 else None,
        cancel_after=_pause(random, layout, timed) if random.random() < 0.12 else None,
        on_failure="raise" if random.random() < 0.1 else "recompute",
        store_first=random.random() < 0.85,
    )


def _fault(random: Random, layout: KvLayout, deadline_s: float, alone: bool) -> Fault:
    # Rot strikes between the check of a layer's bytes and their copy, too, where somebody else loads them just then.
    kind = random.choice([kind for kind in FAULTS if alone or kind != "rot"])
    longest = layout.layers * LAYER_S
    seconds = longest * random.uniform(0.05, 2.0)
    if kind == "stuck":
        seconds = max(deadline_s, longest) * random.uniform(1.5, 20.0)
    return Fault(kind, random.randrange(layout.layers), seconds)


def _pause(random: Random, layout: KvLayout, timed: bool) -> float:
    if timed:
        return layout.layers * LAYER_S * 10 ** random.uniform(-2, 0.5)
    return float(random.randint(1, 30 * layout.layers))
