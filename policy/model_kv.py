"""How wide an element is: dtypes of weights and of KV, and rows of KV that hold more than their values.

A row is what one token leaves in one KV head of one layer: its K, its V, or an MLA latent. A quantised row is
not just narrower values: it carries the scales they are multiplied by, and often padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvlane.policy.errors import InputError

# Weights (and the dtypes a device may state a peak for). A 4-bit weight brings its scales: one fp8 scale for 16
# elements in NVFP4, one e8m0 for 32 in MXFP4 (OCP Microscaling 1.0), one fp16 and half a byte of zero point
# for 128 in AWQ and GPTQ, which both default to groups of 128.
BYTES_PER_ELEMENT: Mapping[str, float] = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8": 1.0,
    "nvfp4": 0.5 + 1 / 16,
    "fp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
    "int4": 0.5 + 2.5 / 128,
}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How one row of KV lies in memory: values, scales, padding.

    `bits` are a value's; every `group` values share a scale of `scale_bytes` (0: the whole row shares one; no
    scale at all where `scale_bytes` is 0). `rotary_bits`, if given, are the width of the rotary part of an MLA
    latent, which such formats leave unquantised and without scales. Each row is padded to `align_bytes`.

    Raises `InputError` naming `kv_format` for a width that is none.
    """

    name: str
    bits: float
    group: int = 0
    scale_bytes: float = 0.0
    rotary_bits: float | None = None
    align_bytes: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 64 or self.group < 0 or self.scale_bytes < 0 or self.align_bytes < 1:
            raise InputError(
                "kv_format", f"{self.name!r} is no row", "bits above zero, scales and padding of zero or more"
            )

    def row_bytes(self, width: int, rotary: int = 0) -> float:
        """Bytes of one row of `width` values and, in an MLA latent, `rotary` more; nothing takes nothing."""
        if width + rotary == 0:
            return 0.0
        if self.rotary_bits is None:
            values, apart = width + rotary, 0.0
        else:
            values, apart = width, rotary * self.rotary_bits / 8
        groups = -(-values // self.group) if self.group else 1
        row = values * self.bits / 8 + groups * self.scale_bytes + apart
        if self.align_bytes == 1:
            return row
        return float(-(-row // self.align_bytes) * self.align_bytes)


def _formats() -> dict[str, KvFormat]:
    plain = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8}
    formats = [KvFormat(name, bits) for name, bits in plain.items()]
    formats += [
        # vLLM's per-token-head KV: one fp32 scale a row.
        KvFormat("fp8_per_token_head", 8, scale_bytes=4),
        KvFormat("int8_per_token_head", 8, scale_bytes=4),
        KvFormat("mxfp8", 8, group=32, scale_bytes=1),
        KvFormat("nvfp4", 4, group=16, scale_bytes=1),
        KvFormat("mxfp4", 4, group=32, scale_bytes=1),
        # DeepSeek's sparse MLA kernels: 512 fp8 values with an fp32 scale for each 128, 64 rotary bf16: 656 bytes.
        KvFormat("fp8_ds_mla", 8, group=128, scale_bytes=4, rotary_bits=16),
        # ggml's blocks of 32 values with one fp16 scale: 34 and 18 bytes.
        KvFormat("q8_0", 8, group=32, scale_bytes=2),
        KvFormat("q4_0", 4, group=32, scale_bytes=2),
    ]
    return {entry.name: entry for entry in formats}


KV_FORMATS: Mapping[str, KvFormat] = _formats()
# "int4_g64": groups of 64 with an fp16 scale and an fp16 zero point. A bare "int4" says too little.
_GROUPED = re.compile(r"int([48])_g([1-9][0-9]{0,4})")


def kv_format(kv_dtype: str | KvFormat, field: str = "kv_dtype") -> KvFormat:
    """The format of that name, or the one given; raises `InputError` naming `field` for an unknown one."""
    if isinstance(kv_dtype, KvFormat):
        return kv_dtype
    if isinstance(kv_dtype, str):
        if kv_dtype in KV_FORMATS:
            return KV_FORMATS[kv_dtype]
        if grouped := _GROUPED.fullmatch(kv_dtype):
            return KvFormat(kv_dtype, int(grouped[1]), group=int(grouped[2]), scale_bytes=4)
    raise InputError(
        field, f"unknown dtype {kv_dtype!r}", f"{', '.join(KV_FORMATS)}, or int4_g64 and the like"
    )


def bytes_per_element(dtype: str, field: str = "kv_dtype") -> float:
    """Bytes of one element of a weight of `dtype`, its share of the scales included.

    Raises `InputError` naming `field` for an unknown one.
    """
    try:
        return BYTES_PER_ELEMENT[dtype]
    except (KeyError, TypeError):
        raise InputError(field, f"unknown dtype {dtype!r}", ", ".join(BYTES_PER_ELEMENT)) from None
