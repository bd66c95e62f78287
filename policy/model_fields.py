"""Reading the fields of a `config.json`, and noticing the ones nobody read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvlane.policy.errors import InputError

_MOST = 10**9

# Names that speak of what a layer keeps or computes. A field with such a name that no reader asked for could
# change the KV or the FLOP, and is refused; anything else (token ids, rope, vision towers) cannot.
_TELLING = re.compile(
    r"head|layer|expert|window|chunk|lora|latent|state|conv|index|compress|sparse|share|hidden|intermediate"
    r"|kv|mamba|ssm|linear|topk|top_k|pattern|sliding|attn_type|block|ffn|mlp|rank|cross|moe|interval|_dim$|k_eq_v|wide"
)
# Fields so named that change neither: how experts are scored, how sums are scaled, multi-token prediction
# (it runs after the first token), what transformers writes into every config.
_HARMLESS = re.compile(
    r".*(dropout|_bias|_eps|_epsilon|_act|_activation|_scaling_factor|_loss_coef|_jitter_noise|layerdrop)"
    r"|(mtp_|num_mtp_|num_nextn_|rope_|rotary_|index_share_for_mtp|initial|pruned_heads|output_|time_step_).*"
    r"|(use_cache|use_mamba_kernels|use_parallel_residual|rescale_prenorm_residual|residual_in_fp32)"
    r"|(norm_topk_prob|topk_method|topk_group|n_group|moe_router_dtype|num_logits_to_keep|ep_size)"
    r"|(use_bias|layernorm_.*|indexer_rope_interleave|moe_shared_expert_overlap|attention_value_scale)"
    r"|(chunk_size_feed_forward|chunk_size|add_cross_attention|cross_attention_hidden_size|swa_rope_theta)"
    r"|(top_k|vocab_size_per_layer_input|head_dtype|num_hidden_groups|num_ln_in_parallel_attn|norm_moe_eps)"
)


class Fields:
    """The fields that describe the decoder, and which of them have been read.

    `text` is the decoder's object, `outer` the one around it (the same where nothing is nested).
    """

    def __init__(self, text: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.text = text
        self.outer = outer
        self._read: set[str] = set()

    def get(self, field: str) -> Any:
        self._read.add(field)
        return self.text.get(field)

    def whole(self, field: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """A whole number; raises `InputError` naming the field when it is none, or missing without default."""
        value = self.get(field)
        if value is None:
            if default is None:
                raise InputError(field, "is missing", f"a whole number of {least} or more")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InputError(field, f"is {str(value)[:40]}", f"a whole number from {least} to {most:,}")
        return value

    def count(self, field: str, default: int = 0) -> int:
        """A whole number, zero allowed and meant by null or false."""
        return default if self.get(field) in (None, False) else self.whole(field, least=0)

    def flag(self, field: str, default: bool) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise InputError(field, f"is {str(value)[:40]}", "true or false")
        return value

    def listing(self, field: str, length: int) -> list[Any] | None:
        """A list with one entry a layer, None where the field is missing, null or empty."""
        value = self.get(field)
        if not value:
            return None
        if not isinstance(value, (list, tuple)):
            raise InputError(field, f"is a {type(value).__name__}", "a list with an entry for each layer")
        if len(value) != length:
            raise InputError(field, f"lists {len(value)} layers", f"{length}, as num_hidden_layers says")
        return list(value)

    def kinds(self, field: str, length: int, known: Mapping[str, str]) -> list[str] | None:
        """The same for names of layer kinds, in our words; raises naming the field for one not in `known`."""
        values = self.listing(field, length)
        if values is None:
            return None
        for value in values:
            if not isinstance(value, str) or value not in known:
                raise InputError(
                    field, f"{str(value)[:40]!r} layers are not supported here", ", ".join(known)
                )
        return [known[value] for value in values]

    def numbers(self, field: str, length: int, known: Sequence[int]) -> list[int] | None:
        """The same for small numbers that name kinds."""
        values = self.listing(field, length)
        if values is None:
            return None
        for value in values:
            if isinstance(value, bool) or value not in known:
                raise InputError(field, f"holds {str(value)[:40]}", f"only {' or '.join(map(str, known))}")
        return [int(value) for value in values]

    def nothing(self, field: str, why: str) -> None:
        """Raises naming the field when it is there and says anything."""
        value = self.get(field)
        if value:
            raise InputError(field, f"{why} ({field} = {str(value)[:40]}) is not supported here", "null")

    def refuse_unread(self, kind: str) -> None:
        """Raises naming the first field that could change KV or FLOP and was not read."""
        for field, value in self.text.items():
            if field in self._read or not isinstance(field, str) or not value:
                continue
            if _TELLING.search(field) and not _HARMLESS.fullmatch(field):
                raise InputError(
                    field,
                    f"{str(value)[:40]} is not understood in a {kind!r} model and could change its costs",
                    "a field of that kind, or null",
                )
