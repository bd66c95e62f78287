"""What one layer keeps of a prompt, and which of its heads are one rank's."""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.errors import InputError


@dataclass(frozen=True, slots=True)
class TpShard:
    """One rank's share of layers whose KV heads are divided over `size` tensor-parallel ranks.

    Raises:
        InputError: an impossible rank.
    """

    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError("shard.size", f"is {self.size}", "at least 1")
        if not 0 <= self.rank < self.size:
            raise InputError("shard.rank", f"is {self.rank}", f"0 to {self.size - 1}")

    def heads(self, kv_heads: int) -> range:
        """Which of a layer's heads are this rank's; ranks share a head where there are more of them than heads.

        Raises:
            InputError: heads and ranks of which neither divides the other.
        """
        if kv_heads % self.size == 0:
            count = kv_heads // self.size
            return range(self.rank * count, (self.rank + 1) * count)
        if self.size % kv_heads == 0:
            head = self.rank * kv_heads // self.size
            return range(head, head + 1)
        raise InputError(
            "shard.size", f"{self.size} ranks cannot share {kv_heads} heads", "one divides the other"
        )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps: rows of keys and values, one of each a token and head, and a state; any of them or none.

    Attributes:
        kv_heads: key/value heads on this rank; 0 where the layer keeps no rows of its own.
        k_width: elements of one head's key.
        v_width: elements of one head's value; 0 where one latent row serves as both.
        itemsize: bytes of one element.
        window: how many of the last tokens before the end of a load have their rows moved; None for all of them.
        state_bytes: a recurrent and convolution state: moved whole, and only there where it was kept.

    Raises:
        InputError: a size that cannot be, or one of a part that the layer does not keep.
    """

    kv_heads: int = 0
    k_width: int = 0
    v_width: int = 0
    itemsize: int = 0
    window: int | None = None
    state_bytes: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.kv_heads else 0
        for name, low in (
            ("kv_heads", 0),
            ("k_width", least),
            ("v_width", 0),
            ("itemsize", least),
            ("state_bytes", 0),
        ):
            if getattr(self, name) < low:
                raise InputError(f"layout.{name}", f"is {getattr(self, name)}", f"at least {low}")
        if self.window is not None and self.window < 1:
            raise InputError("layout.window", f"is {self.window}", "at least 1 token, or None")
        if not self.kv_heads and (self.k_width or self.v_width or self.itemsize or self.window is not None):
            raise InputError("layout.kv_heads", "is 0 beside the sizes of rows", "at least 1, or no rows")

    @property
    def name(self) -> str:
        """Its sizes, as an identity carries them."""
        rows = (
            f"h{self.kv_heads}/k{self.k_width}/v{self.v_width}/b{self.itemsize}" if self.kv_heads else "none"
        )
        window = "" if self.window is None else f"/w{self.window}"
        return f"{rows}{window}" + (f"/s{self.state_bytes}" if self.state_bytes else "")

    @property
    def k_row_bytes(self) -> int:
        """Bytes of one head's key."""
        return self.k_width * self.itemsize

    @property
    def v_row_bytes(self) -> int:
        """Bytes of one head's value."""
        return self.v_width * self.itemsize

    @property
    def k_bytes_per_token(self) -> int:
        return self.kv_heads * self.k_row_bytes

    @property
    def v_bytes_per_token(self) -> int:
        return self.kv_heads * self.v_row_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's rows; a state grows with none."""
        return self.k_bytes_per_token + self.v_bytes_per_token

    def moved(self, start: int, end: int, load_end: int) -> tuple[int, int]:
        """The tokens whose rows move when `[start, end)` are loaded as a part of a load that ends at `load_end`."""
        first = start if self.window is None else max(start, load_end - self.window)
        return (first, end) if self.kv_heads and first < end else (end, end)
