"""KV without numbers: every row of every token has bytes of its own, so that any wrong one is seen."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from kvlane.transfer.identity import EncodedIds
from kvlane.transfer.layout import KvLayout, KvRegion
from kvlane.transfer.shapes import LayerShape
from kvlane.transfer.store import HostBytes, LayerKv

_WORD = 8
_KEYS, _VALUES, _STATE = 0, 1, 2


def rows_only(layout: KvLayout) -> KvLayout:
    """The same layers' rows, of every token: no window, no state. They lie where they lay."""
    return KvLayout.of(_rows_only(shape) for shape in layout.shapes)


@lru_cache
def _rows_only(shape: LayerShape) -> LayerShape:
    return replace(shape, window=None, state_bytes=0)


@dataclass(frozen=True, eq=False)
class PromptKv:
    """What the KV of a prompt is, whoever computed it.

    A token's rows depend on it and on every token before it, as real KV does: prompts that share a prefix share its
    KV, and no others.

    Attributes:
        ids: the prompt's, shape [tokens].
        layout: what a token keeps in each layer.
    """

    ids: EncodedIds
    layout: KvLayout

    @property
    def tokens(self) -> int:
        return int(self.ids.size)

    @cached_property
    def region(self) -> KvRegion:
        """How `block` is arranged: rows of every token in every layer."""
        return KvRegion(rows_only(self.layout), self.tokens)

    @cached_property
    def block(self) -> HostBytes:
        """All rows, uint8 [region.nbytes]."""
        block = np.empty(self.region.nbytes, np.uint8)
        for layer, shape in enumerate(self.layout.shapes):
            low, middle = self.region.key_offset(layer), self.region.value_offset(layer)
            high = middle + self.tokens * shape.v_bytes_per_token
            block[low:middle] = _bytes(self._words[layer, _KEYS], shape.k_bytes_per_token)
            block[middle:high] = _bytes(self._words[layer, _VALUES], shape.v_bytes_per_token)
        return block

    def state(self, layer: int, tokens: int) -> HostBytes:
        """A layer's state after so many tokens."""
        return _bytes(self._words[layer, _STATE, tokens - 1 : tokens], self.layout.shapes[layer].state_bytes)

    def layers(self, tokens: int, checkpoints: tuple[int, ...] = ()) -> Iterator[LayerKv]:
        """The first tokens as a store takes them."""
        for layer, shape in enumerate(self.layout.shapes):
            states = [self.state(layer, at) for at in checkpoints]
            yield (
                self._rows(self.region.key_offset(layer), tokens * shape.k_bytes_per_token),
                self._rows(self.region.value_offset(layer), tokens * shape.v_bytes_per_token),
                np.concatenate(states) if states else np.empty(0, np.uint8),
            )

    def rows(self, layer: int, start: int, end: int) -> tuple[slice, slice]:
        """Where the keys and the values of some tokens of a layer lie in `block`."""
        region = self.region
        return (
            slice(region.key_offset(layer, start), region.key_offset(layer, end)),
            slice(region.value_offset(layer, start), region.value_offset(layer, end)),
        )

    def sum(self, layer: int, rows: HostBytes, before: int) -> int:
        """What the prompt's last token makes of a layer's rows, arranged as `block`, and of the layers before."""
        window = self.layout.shapes[layer].window
        first = 0 if window is None else max(0, self.tokens - window)
        for part in self.rows(layer, first, self.tokens):
            before = zlib.crc32(rows[part].data, before)
        return before

    @cached_property
    def answer(self) -> int:
        """What comes out if everything is computed and nothing loaded."""
        total = 0
        for layer in range(self.layout.layers):
            total = self.sum(layer, self.block, total)
        return total

    def _rows(self, at: int, nbytes: int) -> HostBytes:
        return self.block[at : at + nbytes]

    @cached_property
    def _words(self) -> npt.NDArray[np.uint64]:
        """Eight bytes of no two alike for every layer, kind of row and token, shape [layers, 3, tokens]."""
        chain = np.empty(self.tokens, np.uint64)
        sum_ = 0
        for at, one in enumerate(self.ids.tolist()):
            sum_ = zlib.crc32(one.to_bytes(4, "little"), sum_)
            chain[at] = sum_
        kinds = np.arange(1, 3 * self.layout.layers + 1, dtype=np.uint64).reshape(-1, 3, 1)
        with np.errstate(over="ignore"):
            mixed = (chain + (kinds << np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
        return mixed


def _bytes(words: npt.NDArray[np.uint64], width: int) -> HostBytes:
    """So many bytes for each word, flat."""
    of_words = np.ascontiguousarray(words).view(np.uint8).reshape(-1, _WORD)
    repeats = -(-width // _WORD)
    return np.tile(of_words, (1, repeats))[:, :width].ravel()
