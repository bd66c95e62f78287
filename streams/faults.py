"""What can go wrong with a load, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass


class LoadError(RuntimeError):
    """A load did not deliver a layer's KV: it raised, came late, short or wrong, or was given up.

    Attributes:
        layer: the first layer known not to have come.
        reason: why, in words.
        tier: where it was to come from.
        given_up: nobody wanted it any more: no fault of the tier.
    """

    def __init__(self, layer: int, reason: str, tier: str = "", *, given_up: bool = False) -> None:
        self.layer = layer
        self.reason = reason
        self.tier = tier
        self.given_up = given_up
        super().__init__(f"layer {layer}{f' from {tier}' if tier else ''}: {reason}")


class LoadRefusedError(RuntimeError):
    """There is no room for one more load: too many earlier ones have copies that never ended."""


class StoreSilentError(RuntimeError):
    """A store has not answered in time, or was not asked, since it has not come back from an earlier call."""


class PrefillCancelledError(RuntimeError):
    """The request was called off while it was prefilled."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A load that failed: the first layer known not to have come, from which tier, and why.

    `layer` is None where the tier failed before there was a load.
    """

    layer: int | None
    tier: str
    reason: str

    @classmethod
    def of(cls, error: LoadError) -> LoadFailure:
        return cls(error.layer, error.tier, error.reason)


def in_words(error: BaseException) -> str:
    """What an error says, or its name where it says nothing."""
    return str(error) or type(error).__name__
