"""What is asked over HTTP: the types that decode a request, and that the OpenAPI document is generated from.

Units: tokens, seconds, bytes. An unknown field is refused, so that a misspelt one is never passed over.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvlane.policy.objective import Objective
from kvlane.policy.plan import MOST_TOKENS, Executor, Path
from kvlane.policy.units import LONGEST_S

Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Bytes = Annotated[float, Meta(ge=0, le=1e18)]
Rate = Annotated[float, Meta(ge=1, le=1e15)]
Requests = Annotated[int, Meta(ge=0, le=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]

# More ranks, tiers or checkpoints than any engine has; they bound what one request can cost.
MOST_RANKS = 1024
MOST_HITS = 16
MOST_LINKS = 64
# Prompts that a chart goes up to: each of its points takes as long as a decision, which takes longer the more passes
# the prompt is computed in.
LONGEST_PROMPT = 1 << 20


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    pass


class Hit(_Asked, frozen=True):
    """A stored prefix in one tier: tokens from token 0, one number or one a rank, of which the smallest counts.

    `pending` is one still being written and `miss` none: neither can be loaded. `state_checkpoints` are the token
    counts after which a snapshot of recurrent state is stored.
    """

    tier: Name
    tokens: Tokens | Annotated[list[Tokens], Meta(min_length=1, max_length=MOST_RANKS)]
    state: Literal["hit", "pending", "miss"] = "hit"
    state_checkpoints: Annotated[list[SomeTokens], Meta(max_length=MOST_RANKS)] = []


class LinkState(_Asked, frozen=True):
    """What is queued on one link, in bytes."""

    queued_bytes: Bytes


class State(_Asked, frozen=True):
    """What the engine is busy with. What is given takes the place of what the ledger holds; it is never added.

    `device_busy_s` is how long the device is busy with what came before; where it is not given, the cost of
    `queued_prefill_tokens` stands for it.
    """

    device_busy_s: Seconds | None = None
    num_requests_waiting: Requests | None = None
    num_requests_running: Requests | None = None
    queued_prefill_tokens: Tokens | None = None
    links: Annotated[dict[Name, LinkState], Meta(max_length=MOST_LINKS)] = {}


class Candidate(_Asked, frozen=True):
    """One instance a router may send the request to, and the node it runs on where links are shared by node."""

    instance: Name
    node: Name | None = None
    resident_tokens: Tokens = 0
    hits: Annotated[list[Hit], Meta(max_length=MOST_HITS)] = []
    state: State | None = None


class Question(_Asked, frozen=True):
    """What is asked about one request, whether it is to be decided or only supposed."""

    prompt_tokens: SomeTokens
    deployment: Name | None = None
    instance: Name | None = None
    node: Name | None = None
    resident_tokens: Tokens = 0
    hits: Annotated[list[Hit], Meta(max_length=MOST_HITS)] = []
    prefix_id: Name | None = None
    load_unit_tokens: SomeTokens | None = None
    executor: Executor | None = None
    state: State | None = None
    objective: Objective = "ttft"
    ttft_slo_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] | None = None


class DecideRequest(Question, frozen=True):
    """One request to decide; only `prompt_tokens` is required.

    With `candidates` each of them is answered, ranked by `ttft_s`, and `instance`, `resident_tokens`, `hits` and
    `state` stand in the candidates instead. `reserve` books the first one's link and device seconds until they are
    released, observed, or expire.
    """

    request_id: Name | None = None
    reserve: bool = False
    candidates: Annotated[list[Candidate], Meta(min_length=1)] | UnsetType = UNSET


class WhatIfRequest(Question, frozen=True):
    """One request to decide out of curiosity, with the rates in bytes per second that links are supposed to have.

    The fields are those of a decision. What each copy and each transfer costs beside its bytes stays as it is; so do
    the seconds that are queued already, while `queued_bytes` of `state` are taken at the supposed rate.
    """

    link_bytes_per_s: Annotated[dict[Name, Rate], Meta(max_length=MOST_LINKS)] = {}


class CurvesRequest(_Asked, frozen=True):
    """What load, recompute and split take for prefixes of every length up to `longest_tokens`, all of it in one tier.

    `suffix_tokens` follow the stored prefix whatever its length: with as many as a decision's prompt has behind its
    usable tokens, the crossover is that decision's. The device and the link are taken to be busy with what is said
    here, not with what is booked. `link_bytes_per_s` supposes another rate of the tier's link.
    """

    deployment: Name | None = None
    tier: Name | None = None
    executor: Executor | None = None
    load_unit_tokens: SomeTokens | None = None
    resident_tokens: Tokens = 0
    suffix_tokens: Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)] = 1
    device_busy_s: Seconds = 0.0
    queued_bytes: Bytes = 0.0
    link_bytes_per_s: Rate | None = None
    longest_tokens: Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)] = 32768
    points: Annotated[int, Meta(ge=8, le=128)] = 48


class BatchRequest(_Asked, frozen=True):
    """Many requests as columns of equal length; nothing is reserved, and no ledger is asked."""

    prompt_tokens: Annotated[list[SomeTokens], Meta(min_length=1)]
    resident_tokens: list[Tokens] | None = None
    hits: Annotated[dict[Name, list[Tokens]], Meta(max_length=MOST_HITS)] = {}
    deployment: Name | None = None
    load_unit_tokens: SomeTokens | None = None
    executor: Executor | None = None


class _Observed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, tag_field="type"):
    pass


class TransferObservation(_Observed, frozen=True, tag="transfer"):
    """One transfer over a link; times on the observer's own clock. A cold one paid for a first use."""

    observation_id: Name
    link: Name
    bytes: Annotated[int, Meta(ge=1, le=1 << 53)]
    copies: Annotated[int, Meta(ge=1, le=1 << 53)]
    start_s: float
    end_s: float
    cold: bool = False
    instance: Name | None = None
    deployment: Name | None = None


class PrefillObservation(_Observed, frozen=True, tag="prefill"):
    """One prefill pass. `batch_tokens` counts all tokens of the pass, other requests' among them: only a pass that
    had no others says what this one costs."""

    observation_id: Name
    resident_tokens: Tokens
    new_tokens: SomeTokens
    seconds: float
    batch_tokens: Tokens | None = None
    instance: Name | None = None
    deployment: Name | None = None


class RequestObservation(_Observed, frozen=True, tag="request"):
    """What became of a decision: what was done, and the TTFT it had.

    `tier` says of a decision that loads from several which of them failed, so that only its link is held to account;
    without it all are.
    """

    observation_id: Name
    decision_id: Name
    path_taken: Path
    loaded_tokens: Tokens
    ttft_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] | None = None
    outcome: Literal["ok", "cancelled", "load_failed"] = "ok"
    tier: Name | None = None


Observation = TransferObservation | PrefillObservation | RequestObservation
