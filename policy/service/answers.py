"""What is answered over HTTP: the types that are encoded, and that the OpenAPI document is generated from.

What cannot be computed is null, with the reason beside it; no number is infinite.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvlane.policy.booking import Scope
from kvlane.policy.plan import Executor, LoadSegment, Parameter, Path
from kvlane.policy.timeline import Timeline


class _Answer(msgspec.Struct, gc=False):
    pass


class PathEstimate(_Answer):
    """One path's own best: TTFT with its error band, what copies (their queue included) and compute take alone.

    `front_s` is the part of compute that runs beside the load, before the tokens loaded; `group_layers` how many layers
    share one event.
    """

    ttft_s: float
    low_s: float
    high_s: float
    exposed_s: float
    transfer_s: float
    compute_s: float
    front_s: float
    load: tuple[LoadSegment, ...]
    load_tokens: int
    load_bytes: int
    group_layers: int


class Estimates(_Answer):
    """Every path's estimate, null where there is no such path; `unavailable` then says why."""

    load: PathEstimate | None
    recompute: PathEstimate | None
    split: PathEstimate | None


class TransferParams(_Answer):
    """What vLLM's offloading connector takes as a request's `kv_transfer_params`: load at most so many tokens."""

    max_load_tokens: int


class Advice(_Answer):
    """What an instance should do.

    `kv_transfer_params` is absent where no cap is needed. `joined` says that the load waits for one of the same prefix
    in flight, and `joined_tokens` how many of the load's tokens come with it: the others it moves itself. `meets_slo`
    is null where no objective was given.
    """

    path: Path
    load: tuple[LoadSegment, ...]
    load_tokens: int
    group_layers: int
    recompute_tokens: int
    executor: Executor
    ttft_s: float
    exposed_s: float
    joined: bool
    device_busy_s: float
    meets_slo: bool | None
    estimates: Estimates
    unavailable: dict[Path, str]
    crossover_tokens: int | None
    crossover_note: str
    break_even_bytes_per_s: float | None
    break_even_note: str
    calibrated: bool
    parameters_from: dict[str, Parameter]
    notes: tuple[str, ...]
    reason: str
    kv_transfer_params: TransferParams | UnsetType = UNSET
    joined_tokens: int = 0


class Choice(Advice, kw_only=True):
    """What one instance should do, and which."""

    deployment: str
    instance: str


class Decision(Choice, kw_only=True):
    """The choice for the instance asked about, or for the best of the candidates, which are then all listed, best
    first. `expires_in_s` is how long a reservation lasts, null where nothing was reserved."""

    decision_id: str
    expires_in_s: float | None
    candidates: list[Choice] | UnsetType = UNSET


class WhatIf(Choice, kw_only=True):
    """The choice, and the path chosen in time."""

    timeline: Timeline


class Curves(_Answer):
    """What each path takes for prefixes of `tokens` tokens, all of which `tier` has, as lists beside each other.

    `link_bytes_per_s` is the rate of its link, supposed or in force, and `queued_s` what is queued on it. A split is
    null where there is none, or none that is faster than both others; `break_even_bytes_per_s` is the rate at which
    load and recompute tie. From `crossover_tokens` on, loading is not slower; it need not be one of `tokens`.
    """

    deployment: str
    tier: str
    link: str
    executor: Executor
    link_bytes_per_s: float
    queued_s: float
    tokens: list[int]
    recompute_ttft_s: list[float]
    load_ttft_s: list[float]
    split_ttft_s: list[float | None]
    break_even_bytes_per_s: list[float | None]
    crossover_tokens: int | None
    crossover_note: str


class Decisions(_Answer):
    """The answers to a batch as columns. `tier` is the one that brings the front of what is loaded, null where nothing
    is: which others bring the rest, and what is computed before it, is said of single decisions only."""

    deployment: str
    executor: Executor
    path: list[Path]
    load_tokens: list[int]
    recompute_tokens: list[int]
    ttft_s: list[float]
    tier: list[str | None]


class Refused(_Answer):
    """One record that was not taken: its place in the list, the field at fault, and why."""

    index: int
    field: str
    reason: str


class Observed(_Answer):
    """How many records were taken (those known already among them), and which were not."""

    accepted: int
    duplicates: int
    refused: list[Refused]


class LinkAnswer(_Answer):
    """One link of a deployment: whose it is, and its rate and where that came from."""

    scope: str
    rate_bytes_per_s: float
    source: str


class DeploymentAnswer(_Answer):
    """One deployment as it is served. Loads of a `recurrent` model end where a state checkpoint is stored."""

    name: str
    aliases: list[str]
    model: str
    machine: str
    engine: str
    tensor_parallel_size: int
    kv_cache_dtype: str
    executor: Executor
    prefill_chunk_tokens: int | None
    load_unit_tokens: int
    recurrent: bool
    tiers: dict[str, str]
    links: dict[str, LinkAnswer]


class CalibrationAnswer(_Answer):
    """What a deployment is decided by: `record` is null where nothing was measured and the profile stands.

    `age_s` counts from when the record was measured.
    """

    deployment: str
    source: str
    age_s: float | None
    observations: int
    refused: dict[str, int]
    record: dict[str, Any] | None


class Deployments(_Answer):
    deployments: list[DeploymentAnswer]


class Models(_Answer):
    """What each model that is served weighs, and the names of those built in."""

    models: list[dict[str, Any]]
    built_in: list[str]


class Machines(_Answer):
    """Each machine that is served, with the source of every number, and the names of those built in."""

    machines: list[dict[str, Any]]
    built_in: list[str]


class Calibrations(_Answer):
    calibrations: list[CalibrationAnswer]


class LiveDecisions(_Answer):
    """Decisions since the start, by path."""

    load: int
    recompute: int
    split: int


class LiveCalibration(_Answer):
    """Where what a deployment is decided by comes from: `profile`, `file` or `observations`, and how old it is."""

    source: str
    age_s: float | None
    observations: int


class LiveDeployment(_Answer):
    name: str
    decisions: LiveDecisions
    calibration: LiveCalibration


class LiveLink(_Answer):
    """All links of that name and scope: `queued_bytes` are booked on them together; `queued_s` holds what was reported
    in a `state` as well, and `longest_s` is the longest queue of any one. With `left_alone` loads over one of them keep
    failing, so that none is decided."""

    link: str
    scope: Scope
    queued_bytes: float = 0.0
    queued_s: float = 0.0
    longest_s: float = 0.0
    left_alone: bool = False


class LiveRequest(_Answer):
    """A decision that was followed, when that was observed, and the TTFT it had."""

    at_s: float
    deployment: str
    path: Path
    predicted_ttft_s: float
    ttft_s: float


class LiveRefused(_Answer):
    """An observation that was not taken: its place in what was sent, the field at fault, and why. `deployment` is
    null where it names none that is known."""

    at_s: float
    deployment: str | None
    index: int
    field: str
    reason: str


class LiveAnswer(_Answer):
    """What goes on at `at_s`, in seconds since 1970 UTC; numbers of decisions count from `started_s` on.

    `requests` are the last 200 decisions that were followed and observed, `refused` the last 20 observations that were
    not taken, oldest first.
    """

    at_s: float
    started_s: float
    reservations: int
    deployments: list[LiveDeployment]
    links: list[LiveLink]
    requests: list[LiveRequest]
    refused: list[LiveRefused]


class Health(_Answer):
    status: str


class Problem(msgspec.Struct, rename={"kind": "type"}):
    """A refusal (RFC 9457): `code` is stable, `pointer` is the JSON pointer to the field at fault."""

    kind: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    code: str
    detail: str
    pointer: str | UnsetType = UNSET
