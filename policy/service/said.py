"""What a request says, in the planner's words; and what the planner says of it, in the request's."""

from __future__ import annotations

from kvlane.policy.assignment import Seen
from kvlane.policy.errors import InputError
from kvlane.policy.planner import Planner
from kvlane.policy.service.deployments import Deployment
from kvlane.policy.service.problems import Path as Where
from kvlane.policy.service.problems import ProblemError, of_input_error, pointer
from kvlane.policy.service.types import Hit, State
from kvlane.policy.units import LONGEST_S


def fewest(tokens: list[int], prompt: int) -> int:
    """Of all ranks the fewest, which count; the first that is more than the prompt, for `Request` to refuse."""
    if max(tokens) <= prompt:
        return min(tokens)
    return next(each for each in tokens if each > prompt)


def seen_of(deployment: Deployment, planner: Planner, state: State, base: Where) -> Seen:
    """The request's own words on what is waiting, in seconds; raises `ProblemError` for a link that is none."""
    byte_s = deployment.in_force.byte_s
    busy_s = state.device_busy_s
    if busy_s is None and state.queued_prefill_tokens is not None:
        chunk = deployment.settings.prefill_chunk_tokens
        busy_s = min(planner.prefill.prefill_s(0, state.queued_prefill_tokens, chunk), LONGEST_S)
    for name in state.links:
        if name not in byte_s:
            raise ProblemError(
                "invalid_value",
                f"{name!r} is no link of the deployment (expected {', '.join(byte_s)})",
                pointer(*base, "state", "links", name),
            )
    queued_s = {name: min(link.queued_bytes * byte_s[name], LONGEST_S) for name, link in state.links.items()}
    return Seen(busy_s, queued_s)


def located(error: InputError, hits: list[Hit], base: Where) -> ProblemError:
    """The planner's refusal, with hits found by their place in the list."""
    fields: dict[str, Where] = {}
    for index, hit in enumerate(hits):
        fields[f"hits.{hit.tier}"] = ("hits", index, "tokens")
        fields[f"state_checkpoints.{hit.tier}"] = ("hits", index, "state_checkpoints")
    if error.field in ("prompt_tokens", "load_unit_tokens"):
        base = ()
    return of_input_error(error, fields, base)
