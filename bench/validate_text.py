"""What the texts of a published row say: tables from words to machines, engines, dtypes, links.

Every table is tried in order and the first match counts. Nothing here knows any single row.
"""

from __future__ import annotations

import re
from typing import TypeVar

_Value = TypeVar("_Value")
_Table = tuple[tuple[str, _Value], ...]

# Words for a device, to the machine that describes it. Unqualified names stand for the variant that servers carry.
DEVICES: _Table[str] = (
    (r"gh200", "gh200"),
    (r"gb200", "gb200"),
    (r"gb10|dgx spark", "gb10"),
    (r"b300", "b300-sxm"),
    (r"\bb200", "b200-sxm"),
    (r"h200", "h200-sxm"),
    (r"h100.*(pcie|nvl)", "h100-pcie"),
    (r"h100", "h100-sxm"),
    (r"h800", "h800-sxm"),
    (r"\bh20\b", "h20"),
    (r"a800", "a800-sxm-80gb"),
    (r"a100.*pcie.*40|a100.*40.*pcie", "a100-pcie-40gb"),
    (r"a100.*sxm(?!.*\d).*pcie|a100.*pcie gen", "a100-sxm-80gb"),  # "(PCIe Gen4)" is a host link
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"a100.*40", "a100-sxm-40gb"),
    (r"a100", "a100-sxm-80gb"),
    (r"rtx pro 6000", "rtx-pro-6000"),
    (r"6000 ada", "rtx-6000-ada"),
    (r"5000 ada", "rtx-5000-ada"),
    (r"4000 ada", "rtx-4000-ada"),
    (r"a6000", "rtx-a6000"),
    (r"\ba40\b", "a40"),
    (r"a10g", "a10g"),
    (r"\ba10\b", "a10"),
    (r"\ba30\b", "a30"),
    (r"l40s?\b", "l40s"),
    (r"\bl20\b", "l20"),
    (r"\bl4\b", "l4"),
    (r"3090", "rtx-3090"),
    (r"4080", "rtx-4080"),
    (r"4090", "rtx-4090"),
    (r"5080", "rtx-5080"),
    (r"5090", "rtx-5090"),
    (r"v100s", "v100s-pcie"),
    (r"v100", "v100-sxm"),
    (r"p100", "p100-pcie"),
    (r"mi355x", "mi355x"),
    (r"mi325x", "mi325x"),
    (r"mi300x|gfx942", "mi300x"),
    (r"mi250", "mi250"),
    (r"mi210", "mi210"),
    (r"gaudi ?3", "gaudi3"),
    (r"gaudi ?2", "gaudi2"),
    (r"910b", "ascend-910b"),
    (r"rngd", "rngd"),
    (r"m5 max", "m5-max"),
)
# Where a device is not named, what its host link is still may be.
HOST_LINKS: _Table[str] = (
    (r"c2c", "nvlink-c2c"),
    (r"gen ?5", "pcie5-x16"),
    (r"gen ?4", "pcie4-x16"),
    (r"gen ?3", "pcie3-x16"),
)
# Engines by family: builds, forks and plug-ins of one share its kernels.
ENGINES: _Table[str] = (
    (r"llama\.cpp|llama-bench", "llama_cpp"),
    (r"sglang", "sglang"),
    (r"tensorrt|trt-?llm", "tensorrt_llm"),
    (r"vllm", "vllm"),
    (r"mlx", "mlx"),
    (r"deepspeed", "deepspeed_mii"),
)
# Weights by what they are stored in.
WEIGHTS: _Table[str] = (
    (r"nvfp4|mxfp4|\bfp4", "fp4"),
    (r"fp8", "fp8"),
    (r"int4|awq|gptq|exl[23]|\bq4|ud-q4|4-bit", "int4"),
    (r"w8a8|int8|\bq8|8-bit", "int8"),
    (r"fp16(?!/)", "fp16"),
    (r"bf16", "bf16"),
)
KV: _Table[str] = (
    (r"fp8", "fp8"),
    (r"bf16|fp16", "bf16"),
)
# A kernel's or a batched call's own link, beside the copy engine's.
COPY_METHODS: _Table[str] = (
    (r"sm kernel|custom kernel|kvcacheio|sgl_kernel", "kernel"),
    (r"memcpybatch", "batch"),
)
# Tiers by the link that limits them; {n} drives, {g} Gb/s and a device's host link are read beside.
TIERS: _Table[str] = (
    (r"tcp", "tcp-loopback"),
    (r"cxl", "cxl"),
    (r"nvme", "drives"),
    (r"\bssd/nfs|\bnfs\b(?!.*rdma)", "nfs"),
    (r"rdma|remote|object|3fs", "network"),
    (r"ssd|file system|disk", "drives"),
    (r"host|dram|pinned|cpu", "host"),
)
_DRIVES = re.compile(r"(\d+) *(?:x )?(?:pcie gen\d )?(?:nvme|ssd|drive)", re.I)
_TIMES = re.compile(r"(\d+) storage nodes? x (\d+) nvme", re.I)
_GBITS = re.compile(r"(?:(\d+) ?x ?)?(\d+) ?gb?(?:/s|\b)(?!yte)", re.I)
_WATTS = re.compile(r"(\d+) ?W\b")
_BLOCK = re.compile(r"(\d+(?:\.\d+)?) ?(KB|MB|KiB|MiB) blocks")
_BLOCK_BYTES = {"KB": 1 << 10, "KiB": 1 << 10, "MB": 1 << 20, "MiB": 1 << 20}


def look_up(table: _Table[_Value], text: str) -> _Value | None:
    """The value of the first pattern found in `text`, case apart."""
    return next((value for pattern, value in table if re.search(pattern, text, re.I)), None)


def engine_family(text: str) -> str:
    """The engine's family, or its own first word in lower case where it belongs to none known."""
    known = look_up(ENGINES, text)
    if known is not None:
        return known
    words = re.findall(r"[a-z0-9]+", text.lower())
    return words[0] if words else "not_stated"


def cards(gpu: str, stated: str) -> tuple[int, int]:
    """Tensor-parallel ranks and pipeline stages; a layer split computes one stage after another."""
    count = re.search(r"(\d+)", stated) or re.search(r"(\d+) ?x ", gpu)
    number = int(count[1]) if count else 1
    return (1, number) if "layer split" in stated else (number, 1)


def prompts_at_once(text: str) -> int:
    """Prompts computed as one batch; a concurrency of clients is not that."""
    found = re.search(r"batch (\d+)", text, re.I)
    return int(found[1]) if found else 1


def watts(gpu: str) -> float | None:
    """The power limit that a device's text states."""
    found = _WATTS.search(gpu)
    return float(found[1]) if found else None


def block_bytes(notes: str) -> float | None:
    """The size of the blocks a load copies, where the notes state it."""
    found = _BLOCK.search(notes)
    return float(found[1]) * _BLOCK_BYTES[found[2]] if found else None


def drives(text: str) -> int:
    """Drives that serve a tier together."""
    product = _TIMES.search(text)
    if product:
        return int(product[1]) * int(product[2])
    found = _DRIVES.search(text)
    return int(found[1]) if found else 1


def line_rate(text: str) -> float | None:
    """Bytes per second of the network that a text states in Gb/s ("2x400Gb/s", "8x400G NICs")."""
    found = _GBITS.search(text)
    return int(found[1] or 1) * int(found[2]) * 1e9 / 8 if found else None


def stated_rate(text: str) -> float | None:
    """Bytes per second that a row states its link achieves."""
    found = re.search(r"(\d+(?:\.\d+)?)", text)
    return float(found[1]) * 1e9 if found else None
