"""The key under which KV is stored: everything that makes its numbers what they are.

A stored prefix is found again only by a chain of digests seeded with the whole identity, so any part of it that
differs, or any earlier token, is a miss and can never be a wrong hit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvlane.policy.errors import InputError

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
EncodedIds: TypeAlias = npt.NDArray[np.uint32]

_ID_DTYPE = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """What two KV caches must share before one may stand in for the other.

    Attributes:
        model: name of the architecture and checkpoint.
        weights_revision: revision of the weights (a commit, a digest, a seed for random ones).
        adapter: name and revision of a LoRA or other adapter, None without one.
        kv_dtype: element type of the stored bytes.
        layout: `KvLayout.name`, how those bytes are arranged.
        tp_rank: tensor-parallel rank the bytes belong to.
        tp_size: number of tensor-parallel ranks.
        positional: rotary type, base and scaling as one canonical string; keys are stored rotated.
        numerics: everything else in the model's configuration that its KV depends on (norms, activations, biases,
            sizes), as one canonical string or its digest.

    Raises:
        InputError: an empty name or an impossible rank.
    """

    model: str
    weights_revision: str
    adapter: str | None
    kv_dtype: str
    layout: str
    tp_rank: int
    tp_size: int
    positional: str
    numerics: str

    def __post_init__(self) -> None:
        for name in ("model", "weights_revision", "kv_dtype", "layout", "numerics"):
            if not getattr(self, name):
                raise InputError(f"identity.{name}", "is empty", "a name")
        if self.tp_size < 1:
            raise InputError("identity.tp_size", f"is {self.tp_size}", "at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise InputError("identity.tp_rank", f"is {self.tp_rank}", f"0 to {self.tp_size - 1}")

    def encoded(self) -> bytes:
        """The identity as bytes; two identities share them only if every field is equal."""
        return b"".join(_encode(f.name) + _encode(getattr(self, f.name)) for f in fields(self))


def _encode(value: str | int | None) -> bytes:
    # A type tag and a length before every value: no text inside one field can imitate another field.
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "little")
    raw = value.encode()
    return b"s" + len(raw).to_bytes(8, "little") + raw


def encode_token_ids(token_ids: TokenIds) -> EncodedIds:
    """Token ids as fixed-width little-endian integers, shape [tokens].

    Raises:
        InputError: not one-dimensional, not integers, negative, or 2**32 and above.
    """
    ids = np.asarray(token_ids)
    if ids.ndim != 1:
        raise InputError("token_ids", f"has {ids.ndim} dimensions", "one")
    if ids.size == 0:
        return np.empty(0, _ID_DTYPE)
    if ids.dtype.kind not in "iu":
        raise InputError("token_ids", f"holds {ids.dtype}", "integers")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0:
        raise InputError("token_ids", f"holds {lowest}", "no negative id")
    if highest >= 2**32:
        raise InputError("token_ids", f"holds {highest}", "ids below 2**32")
    return np.ascontiguousarray(ids, dtype=_ID_DTYPE)


def iter_token_chain(identity: KvIdentity, ids: EncodedIds, unit_tokens: int) -> Iterator[bytes]:
    """Lazily, one digest for each whole unit of `ids`; a lookup stops hashing at its first miss."""
    if unit_tokens < 1:
        raise InputError("unit_tokens", f"is {unit_tokens}", "at least 1")
    digest = hashlib.sha256(_encode(unit_tokens) + identity.encoded()).digest()
    raw = ids.tobytes()
    step = unit_tokens * _ID_DTYPE.itemsize
    for end in range(step, len(raw) + 1, step):
        digest = hashlib.sha256(digest + raw[end - step : end]).digest()
        yield digest


def token_chain(identity: KvIdentity, token_ids: TokenIds, unit_tokens: int) -> tuple[bytes, ...]:
    """One sha256 digest per whole unit of tokens, each over the identity and every token up to its unit's end.

    Raises:
        InputError: unusable token ids, or a unit below one token.
    """
    return tuple(iter_token_chain(identity, encode_token_ids(token_ids), unit_tokens))
