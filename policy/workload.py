"""What one prefill has to do: FLOP by the kernels that do them, bytes of weights read, bytes exchanged.

The amounts follow from the model alone. How long they take is a matter of rates (`kvlane.policy.pass_rates`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlane.policy.model import KvFormat, ModelSpec, bytes_per_element

# Activations are exchanged between ranks in 16 bits.
_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one or several passes, over all ranks together.

    `dense_flop` is that of projections and dense MLP, `wide_flop` of what stays in 16 bits in a quantised checkpoint
    (the LM head, for one token a sequence, among it), `expert_flop` that of routed experts, `attention_flop` that
    over pairs and of recurrent states. `weight_bytes` and
    `kv_bytes` are read once a pass. `all_reduce_bytes` is the size of all tensors reduced over the ranks,
    `all_reduces` their number. `layers` counts layers times passes, `passes` the passes.
    """

    dense_flop: float
    wide_flop: float
    expert_flop: float
    attention_flop: float
    weight_bytes: float
    kv_bytes: float
    all_reduce_bytes: float
    all_reduces: int
    layers: int
    passes: int

    def __add__(self, other: Workload) -> Workload:
        return Workload(
            *(getattr(self, name) + getattr(other, name) for name in Workload.__dataclass_fields__)
        )

    @property
    def flop(self) -> float:
        """All of its floating-point operations."""
        return self.dense_flop + self.wide_flop + self.expert_flop + self.attention_flop


def pass_workload(
    model: ModelSpec,
    resident: int,
    new: int,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str | KvFormat | None = None,
    tp: int = 1,
    sequences: int = 1,
    with_head: bool = True,
) -> Workload:
    """One pass of `new` tokens after `resident` cached ones, in each of `sequences` prompts batched together.

    Prompts in one batch share the reading of the weights, and no attended pairs. `with_head` is whether the LM head
    runs, as it does in a prompt's last pass. Raises `InputError` naming
    `weight_dtype`.
    """
    element = bytes_per_element(weight_dtype or model.weight_dtype, "weight_dtype")
    tokens = new * sequences
    head = model.hidden * model.vocab if with_head else 0
    layers = model.layers
    form = model.form(kv_dtype)
    reduces = sum(layer.all_reduces for layer in layers)
    return Workload(
        dense_flop=sum(2.0 * (layer.weights - layer.wide_weights) for layer in layers) * tokens,
        wide_flop=sum(2.0 * layer.wide_weights for layer in layers) * tokens + 2.0 * head * sequences,
        expert_flop=sum(2.0 * (layer.active_weights - layer.weights) for layer in layers) * tokens,
        attention_flop=sum(
            layer.attention_flop(resident, new) * sequences + layer.state_flop_per_token * tokens
            for layer in layers
        ),
        weight_bytes=sum(layer.weight_bytes(element, tokens) for layer in layers) + head * max(2.0, element),
        kv_bytes=sum(
            (layer.kv_row_bytes(form, tp) + layer.indexer_row_bytes) * tp * layer.moved_tokens(resident + new)
            for layer in layers
        )
        * sequences,
        all_reduce_bytes=reduces * tokens * model.hidden * _ACTIVATION_BYTES,
        all_reduces=reduces,
        layers=len(layers),
        passes=1,
    )


def prefill_workload(
    model: ModelSpec,
    resident: int,
    new: int,
    chunk_tokens: int | None = None,
    *,
    weight_dtype: str | None = None,
    kv_dtype: str | KvFormat | None = None,
    tp: int = 1,
    sequences: int = 1,
) -> Workload:
    """All passes of an engine that computes at most `chunk_tokens` tokens a pass (None: all in one).

    A batch of several prompts is chunked as one run of tokens: whole prompts go into one pass together as far as
    they fit. Raises `InputError` as `pass_workload` does.
    """

    def one(first: int, count: int, prompts: int, last: bool = True) -> Workload:
        return pass_workload(
            model,
            first,
            count,
            weight_dtype=weight_dtype,
            kv_dtype=kv_dtype,
            tp=tp,
            sequences=prompts,
            with_head=last,
        )

    if chunk_tokens is None or new * sequences <= chunk_tokens:
        return one(resident, new, sequences)
    if new <= chunk_tokens:
        together = chunk_tokens // new
        whole, rest = divmod(sequences, together)
        parts = [one(resident, new, together)] * whole + ([one(resident, new, rest)] if rest else [])
    else:
        parts = [
            one(resident + start, min(chunk_tokens, new - start), 1, start + chunk_tokens >= new)
            for start in range(0, new, chunk_tokens)
        ] * sequences
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
