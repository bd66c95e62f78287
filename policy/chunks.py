"""What one layer computes and reads over many passes of equally many tokens, without going from pass to pass.

A prompt of millions of tokens has thousands of passes, and a decision prices some fifty such prefills. Attended pairs
add up to those of all the tokens in one pass; what a pass does over its whole context grows evenly from pass to pass,
until a window bounds it.
"""

from __future__ import annotations

from kvlane.policy.model_layer import LayerSpec, attention_pairs


def attention_flop_of_chunks(layer: LayerSpec, resident: int, chunk: int, count: int) -> float:
    """`layer.attention_flop` added up over `count` passes of `chunk` tokens, the first after `resident` cached ones."""
    pairs = layer.pairs(resident, chunk * count)
    if layer.latent is None:
        flop = layer.flop_per_pair * pairs
    elif layer.latent.compute == "absorbed":
        flop = layer.latent.absorbed_flop(layer.heads) * pairs
    else:
        prefix = layer.latent.up_flop(layer.heads) * _starts(resident, chunk, count)
        flop = layer.flop_per_pair * pairs + prefix
        if layer.latent.compute == "cheaper":
            flop -= _saved_by_absorbing(layer, resident, chunk, count)
    if layer.indexer is not None:
        flop += layer.indexer.flop_per_pair * attention_pairs(resident, chunk * count)
    return flop


def moved_tokens_of_chunks(layer: LayerSpec, resident: int, chunk: int, count: int) -> int:
    """`layer.moved_tokens` of the context after each of those passes, added up."""
    if layer.window is None:
        return _starts(resident + chunk, chunk, count)
    inside = _passes_up_to(layer.window, resident, chunk, count)
    return _starts(resident + chunk, chunk, inside) + (count - inside) * layer.window


def _saved_by_absorbing(layer: LayerSpec, resident: int, chunk: int, count: int) -> float:
    """FLOP by which the passes that are cheaper absorbed are cheaper."""
    bound = layer.window if layer.indexer is None else layer.indexer.topk
    # Between passes wholly below the bound and wholly beyond it there is one across it, and in each run both ways'
    # FLOP grow evenly.
    below = count if bound is None else _passes_up_to(bound, resident, chunk, count)
    runs = [(0, below), (below, min(below + 1, count)), (min(below + 1, count), count)]
    return sum(_saved_in_run(layer, resident + low * chunk, chunk, high - low) for low, high in runs)


def _saved_in_run(layer: LayerSpec, resident: int, chunk: int, count: int) -> float:
    """The same for passes over which what is saved grows, or falls, evenly."""
    if count <= 0:
        return 0.0
    first = _saved(layer, resident, chunk)
    if count == 1:
        return max(first, 0.0)
    last = _saved(layer, resident + (count - 1) * chunk, chunk)
    if first <= 0 and last <= 0:
        return 0.0
    step = (last - first) / (count - 1)
    low, high = 0, count
    if first < 0:
        low = min(int(-first / step) + 1, count)
    elif last < 0:
        high = min(int(-first / step) + 1, count)
    return (high - low) * first + step * (high * (high - 1) - low * (low - 1)) / 2


def _saved(layer: LayerSpec, resident: int, chunk: int) -> float:
    """FLOP by which one pass is cheaper absorbed; negative where it is dearer."""
    assert layer.latent is not None
    dearer = layer.latent.absorbed_flop(layer.heads) - layer.flop_per_pair
    return layer.latent.up_flop(layer.heads) * resident - dearer * layer.pairs(resident, chunk)


def _passes_up_to(bound: int, resident: int, chunk: int, count: int) -> int:
    """How many of the passes end with at most `bound` tokens of context."""
    return min(max((bound - resident) // chunk, 0), count)


def _starts(first: int, chunk: int, count: int) -> int:
    """The sum of `count` numbers of tokens from `first` on, `chunk` apart."""
    return count * first + chunk * count * (count - 1) // 2
