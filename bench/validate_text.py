"""What the texts of a published row say: tables from words to machines, engines, dtypes, links.

Every table is tried in order and the first match counts. Nothing here knows any single row.
"""

from __future__ import annotations

import re
from typing import TypeVar

from kvlane.policy.units import parse_rate

_Value = TypeVar("_Value")
_Table = tuple[tuple[str, _Value], ...]

# Parts of the patterns for devices: where a name begins ("8xA40", "NVIDIA_A40") and ends, what may stand between its
# words, that PCIe names the card and not (in brackets) its host link, and that it is the plain desktop card.
_B = r"(?:(?<![a-z0-9])|(?<=\dx))"
_E = r"(?![a-z0-9])"
_S = r"[ _-]*"
_CARD = r"(?=[^(]*pcie|.*\(pcie\))"
_DESKTOP = r"(?!.*(?:laptop|mobile|max-?q|super))(?![ _-]*(?:ti|d)(?![a-z0-9]))"
# What a cell says that states nothing: the default holds.
_SILENT = (
    r"not stated|not given|default|see issue|unknown|unspecified|n/a|native|original"
    r"|(?<![a-z])auto(?![a-z])|^[-?]+$|^none$"
)

# Words for a device, to the machine that describes it. Unqualified names stand for the variant that servers carry; a
# variant of other silicon or power (Laptop, Ti, NVL) is none of them. A link in brackets is the host's: "(PCIe Gen4)".
DEVICES: _Table[str] = (
    (r"gh200", "gh200"),
    (r"gb200", "gb200"),
    (r"gb10(?!\d)|dgx[ _-]?spark", "gb10"),
    (rf"{_B}b300{_E}", "b300-sxm"),
    (rf"{_B}b200{_E}", "b200-sxm"),
    (rf"{_B}h200{_E}(?!{_S}nvl(?!ink))", "h200-sxm"),
    (rf"{_B}h100{_E}(?!.*nvl(?!ink))(?!.*sxm){_CARD}", "h100-pcie"),
    (rf"{_B}h100{_E}(?!.*nvl(?!ink))", "h100-sxm"),
    (rf"{_B}h800{_E}(?:(?=.*sxm)|(?!{_CARD}))", "h800-sxm"),
    (rf"{_B}h20{_E}(?!-3e)", "h20"),
    (rf"{_B}a800{_E}(?!.*(?<!\d)40 ?g)(?:(?=.*sxm)|(?!{_CARD}))", "a800-sxm-80gb"),
    (rf"{_B}a100{_E}(?!.*sxm)(?=.*(?<!\d)40 ?g){_CARD}", "a100-pcie-40gb"),
    (rf"{_B}a100{_E}(?!.*sxm){_CARD}", "a100-pcie-80gb"),
    (rf"{_B}a100{_E}.*(?<!\d)40 ?g(?!b/)", "a100-sxm-40gb"),
    (rf"{_B}a100{_E}", "a100-sxm-80gb"),
    (rf"rtx{_S}pro{_S}6000{_E}(?!.*(?:max-?q|laptop|mobile))", "rtx-pro-6000"),
    (rf"6000{_S}ada(?!.*(?:laptop|mobile))", "rtx-6000-ada"),
    (rf"(?<!\d)5000{_S}ada(?!.*(?:laptop|mobile))", "rtx-5000-ada"),
    (rf"(?<!\d)4000{_S}ada(?!.*(?:laptop|mobile|sff))", "rtx-4000-ada"),
    (rf"a6000{_E}", "rtx-a6000"),
    (rf"{_B}a40{_E}", "a40"),
    (rf"{_B}a10g{_E}", "a10g"),
    (rf"{_B}a10{_E}", "a10"),
    (rf"{_B}a30{_E}", "a30"),
    (rf"{_B}l40s{_E}", "l40s"),
    (rf"{_B}l20{_E}", "l20"),
    (rf"{_B}l4{_E}", "l4"),
    (rf"(?<!\d)3090{_E}{_DESKTOP}", "rtx-3090"),
    (rf"(?<!\d)4080{_E}{_DESKTOP}", "rtx-4080"),
    (rf"(?<!\d)4090{_E}{_DESKTOP}", "rtx-4090"),
    (rf"(?<!\d)5080{_E}{_DESKTOP}", "rtx-5080"),
    (rf"(?<!\d)5090{_E}{_DESKTOP}", "rtx-5090"),
    (rf"{_B}v100s{_E}", "v100s-pcie"),
    (rf"{_B}v100{_E}(?:(?=.*sxm)|(?!{_CARD}))", "v100-sxm"),
    (rf"{_B}p100{_E}", "p100-pcie"),
    (rf"{_B}mi355x{_E}", "mi355x"),
    (rf"{_B}mi325x{_E}", "mi325x"),
    (rf"{_B}mi300x{_E}|gfx942", "mi300x"),
    (rf"{_B}mi250{_E}", "mi250"),
    (rf"{_B}mi210{_E}", "mi210"),
    (rf"gaudi{_S}3{_E}", "gaudi3"),
    (rf"gaudi{_S}2{_E}", "gaudi2"),
    (r"910b2?(?![a-z0-9])", "ascend-910b"),
    (rf"{_B}rngd{_E}", "rngd"),
    (rf"{_B}m5{_S}max{_E}", "m5-max"),
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
    (r"llama[ ._-]?cpp|llama-(?:bench|server|cli)|ollama", "llama_cpp"),
    (r"sglang|(?<![a-z])sgl(?![a-z])", "sglang"),
    (r"tensorrt|trt[-_ ]?llm", "tensorrt_llm"),
    (r"vllm", "vllm"),
    (r"mlx", "mlx"),
    (r"deepspeed", "deepspeed_mii"),
)
# What a value begins with that leaves the row out; the reason follows.
_LEFT_OUT = "left out: "
# Weights by what they are stored in. The text is the cell, a space and the model: one that begins with a space had an
# empty cell, and of any other whatever nothing matched leaves the row out.
WEIGHTS: _Table[str] = (
    (r"(?<![a-z])kv(?![a-z])", _LEFT_OUT + "weights and KV are named in one"),
    (
        r"w8a16|(?:gptq|awq).*(?:int8|8[- ]?bit)",
        _LEFT_OUT + "8-bit weights computed in 16 bits are not described",
    ),
    (r"w4a8", _LEFT_OUT + "4-bit weights computed in 8 bits are not described"),
    (
        r"(?<![a-z0-9])i?q[12356](?:_|-?bit|(?![a-z0-9]))",
        _LEFT_OUT + "weights of that many bits are not described",
    ),
    (r"nvfp4|mxfp4|(?<![a-z])fp4", "fp4"),
    (r"fp8|float8|e4m3|e5m2|(?<![a-z0-9])f8(?![0-9])", "fp8"),
    (r"int4|w4a16|awq|gptq|exl[23]|(?<![a-z0-9])i?q4|(?<![0-9.])4[- ]?bit", "int4"),
    (r"w8a8|int8|(?<![a-z0-9])q8|(?<![0-9.])8[- ]?bit", "int8"),
    (r"fp32|float32|(?<![a-z0-9])f32", _LEFT_OUT + "weights in fp32 are not described"),
    (r"bfloat16|bf16/|w16a16|(?<![0-9.])16[- ]?bit", "bf16"),
    (r"fp16(?!/)|float16|(?<![a-z0-9])f16(?![0-9])|(?<![a-z])half(?![a-z])", "fp16"),
    (r"bf16", "bf16"),
    (_SILENT, ""),
    (r"^\S", _LEFT_OUT + "the weights are not understood"),
)
KV: _Table[str] = (
    (r"nvfp4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"(?<![a-z0-9])q4_0", "q4_0"),
    (r"fp8|float8|e4m3|e5m2|(?<![a-z0-9])f8(?![0-9])", "fp8"),
    (r"int8|(?<![0-9.])8[- ]?bit", "int8"),
    (r"fp32|float32|(?<![a-z0-9])f32", "fp32"),
    (r"bf16|fp16|float16|(?<![a-z0-9])f16(?![0-9])|(?<![0-9.])16[- ]?bit|(?<![a-z])half(?![a-z])", "bf16"),
    (_SILENT, ""),
    (r"\S", _LEFT_OUT + "the KV dtype is not understood"),
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
_DRIVES = re.compile(
    r"(?<![\w.])(\d+) *(?:[x×] *)?(?:nvme|ssd|drive)|nvme(?: ssds?| drives?)? ?[x×] ?(\d+)", re.I
)
_LANES = re.compile(r"pcie[ -]?(?:gen ?)?\d(?:\.0)?(?: ?x ?\d+)?|gen ?\d(?: ?x ?\d+)?", re.I)
_TIMES = re.compile(r"(\d+) storage nodes? x (\d+) nvme", re.I)
# Networks are named in bits; a capital B with a slash is a measured rate.
_GBITS = re.compile(
    r"(?:(\d+) ?[x×] ?)?(\d+) ?[gG](?:[bB](?:it|ps|E(?![a-z]))[^ ]*|b(?:/s)?|(?=\W|$))(?!yte)"
)
_COUNT = re.compile(r"(?<![\w.])(\d+) ?[x×] ?(?=[a-z])|(?<![\w.])(\d+)[ -]?(?:gpus?|cards?)\b", re.I)
_RANKS = re.compile(
    r"(?<![a-z])tp(?:[ _-]?size)?[ =:_-]*(\d+)|tensor[ _-]parallel(?:ism|[ _-]size)?[ =:_-]*(\d+)"
    r"|(\d+)[ -]?(?:way )?(?:tp|tensor)(?![a-z])"
)
_PLAIN_COUNT = re.compile(r"(\d+) ?(?:[x×]|gpus?|cards?|ranks?)?(?: ?\(.*\))?")
_SPREAD = re.compile(
    r"(?<![a-z])(pp|dp|ep|cp|pipeline|data|expert)(?:[ -]?parallel\w*)?(?:[ _-]?size)?[ =:_-]*(\d*)"
)
_BATCH = re.compile(
    r"(?<![a-z])(?:batch(?:ed)?(?:[ _-]?size)?|bs)[ =:_-]*(\d+)|^(\d+) (?:in a|per) batch", re.I
)
_CLIENTS = re.compile(
    r"\d+(?: ?\(.*\))?|(?:max[ _-]?)?(?:concurren\w*|conc|c|clients?|users?|requests?|streams?)[ =:_-]*\d+"
    r"|\d+[ -](?:concurren\w*|clients?|users?|requests?|streams?|serial|sequential)\b.*"
    r"|single\b.*|serial\b.*|sequential\b.*|one\b.*",
    re.I,
)
_RATE = re.compile(r"[~≈]?\s*((?:\d+\.?\d*) ?[kKMGT]i?(?:[Bb](?:ytes?|its?)?)(?: ?/ ?s|ps)(?:ec)?)(?![a-z])")
_PLAIN_RATE = re.compile(r"[~≈]?\s*(\d+(?:\.\d+)?)\s*(?:$|\(|one\b|each\b|per\b)")
_WATTS = re.compile(r"(\d+) ?W\b")
_BLOCK = re.compile(r"(\d+(?:\.\d+)?) ?(KB|MB|KiB|MiB) blocks")
_BLOCK_BYTES = {"KB": 1 << 10, "KiB": 1 << 10, "MB": 1 << 20, "MiB": 1 << 20}


class UnpredictableError(Exception):
    """A row that nothing can be predicted for, with the reason."""


def look_up(table: _Table[_Value], text: str) -> _Value | None:
    """The value of the first pattern found in `text`, case apart; None where there is none, or it states nothing.

    Raises `UnpredictableError` where the table says that such a text cannot be priced.
    """
    value = next((value for pattern, value in table if re.search(pattern, text, re.I)), None)
    if isinstance(value, str) and value.startswith(_LEFT_OUT):
        raise UnpredictableError(f"{value.removeprefix(_LEFT_OUT)}: {text.strip()}")
    return None if value == "" else value


def engine_family(text: str) -> str:
    """The engine's family, or its own first word in lower case where it belongs to none known."""
    known = look_up(ENGINES, text)
    if known is not None:
        return known
    words = re.findall(r"[a-z0-9]+", text.lower())
    return words[0] if words else "not_stated"


def cards(gpu: str, stated: str) -> tuple[int, int]:
    """Tensor-parallel ranks and pipeline stages; a layer split computes one stage after another.

    Raises `UnpredictableError` for several nodes and for cards that share the work in other ways.
    """
    words = re.sub(r"^1 ?(?:[x×] ?)?node,? ?[x×]? ?", "", stated.lower())
    if re.search(r"(?<![\w.])(?!1 )\d+ ?(?:[x×] ?)?nodes?\b", f"{gpu.lower()} {words}"):
        raise UnpredictableError(f"several nodes are not described: {stated or gpu}")
    if not words or re.search(_SILENT, words):
        count = _COUNT.search(gpu)
        return max(1, int(count[1] or count[2])) if count else 1, 1
    ranks = _RANKS.search(words)
    plain = _PLAIN_COUNT.fullmatch(words)
    number = int(next(filter(None, ranks.groups())) if ranks else plain[1] if plain else 0)
    if "layer split" in words:
        spread = None
    else:
        spread = next(
            (each for each in _SPREAD.finditer(words) if each[2] != "1" and not _same(each, number)), None
        )
    if number < 1 or spread is not None:
        raise UnpredictableError(f"how the cards share the work is not described: {stated}")
    return (1, number) if "layer split" in words else (number, 1)


def _same(spread: re.Match[str], ranks: int) -> bool:
    """Whether experts are spread over the very ranks that share everything else."""
    return spread[1] in ("ep", "expert") and spread[2] == str(ranks)


def prompts_at_once(text: str) -> int:
    """Prompts computed as one batch; a concurrency of clients is not that, each waits for its own first token.

    Raises `UnpredictableError` for a text that is neither.
    """
    found = _BATCH.search(text)
    number = int(found[1] or found[2]) if found else 1
    if number < 1 or not (found or not text or _CLIENTS.fullmatch(text) or re.search(_SILENT, text, re.I)):
        raise UnpredictableError(f"the batch is not understood: {text}")
    return number


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
    found = _DRIVES.search(_LANES.sub("", text))
    return int(found[1] or found[2]) if found else 1


def line_rate(text: str) -> float | None:
    """Bytes per second of the network that a text states in Gb/s ("2x400Gb/s", "8x400G NICs")."""
    found = _GBITS.search(text)
    return int(found[1] or 1) * int(found[2]) * 1e9 / 8 if found else None


def stated_rate(text: str) -> float | None:
    """Bytes per second that a row states its link achieves: GB/s where no unit is named, None where it says nothing.

    Raises `UnpredictableError` for a text that states no single rate.
    """
    if not text or re.search(_SILENT, text, re.I):
        return None
    named = _RATE.findall(text)
    plain = _PLAIN_RATE.match(text)
    if len(named) == 1 and not re.search(r"\d ?(?:-|–|to) ?\d|both|bidir|\d ?[x×] ?\d", text, re.I):
        return parse_rate(named[0], "link rate")
    if plain and not named:
        return float(plain[1]) * 1e9
    raise UnpredictableError(f"the link's rate is not understood: {text}")
