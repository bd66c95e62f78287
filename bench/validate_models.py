"""The models that published rows name: built-in ones, and two whose kinds a config.json reader does not know yet.

Two built-in ones stand for others whose own configs were not at hand, an assumption: Qwen3.5-27B for Qwen3.8-27B, and
GLM-5.2 for GLM-5.3 (743B).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvlane.policy.catalog import load_model, model_names
from kvlane.policy.model import LayerSpec, ModelSpec
from kvlane.policy.model_layer import Experts, Indexer, Latent, State

# Words for a model as `_words` leaves them, to its name here or in the catalog; "" for one that only looks like
# another. A variant that only quantises or tunes is the same model.
_NAMES = (
    (r"distill-llama-8b", "llama-3.1-8b"),
    (r"distill-qwen-32b", "qwen2.5-32b"),
    (r"distill|deepseek-r1.*qwen.*", ""),
    (r"qwq-32b", "qwq-32b"),
    (r"llama-3\.2-1b", "llama-3.2-1b"),
    (r"llama-3\.2-3b", "llama-3.2-3b"),
    (r"llama-3\.[13]-70b", "llama-3.1-70b"),
    (r"llama-3\.1-8b", "llama-3.1-8b"),
    (r"llama-3-70b", "llama-3-70b"),
    (r"llama-3-8b", "llama-3-8b"),
    (r"llama-(?:v?2-)?70b", "llama-2-70b"),
    (r"llama-v?2-13b", "llama-2-13b"),
    (r"llama-(?:v?2-)?7b", "llama-2-7b"),
    (r"mixtral-8x7b", "mixtral-8x7b"),
    (r"mistral-7b(?=.*v0\.3)", "mistral-7b-v0.3"),
    (r"mistral-7b(?=.*v0\.2)", "mistral-7b-v0.2"),
    (r"mistral-7b(?=.*v0\.(?!1))", ""),
    (r"mistral-nemo", "mistral-nemo-12b"),
    (r"mistral-small-(?:3(?:\.[0-2])?-)?24b", "mistral-small-24b"),
    (r"gpt-?j-6b", "gpt-j-6b"),
    (r"falcon-180b", "falcon-180b"),
    (r"qwen3-235b", "qwen3-235b-a22b"),
    (r"qwen3-(?:vl-|coder-)?30b", "qwen3-30b-a3b"),
    (r"qwen3-next-80b", "qwen3-next-80b-a3b"),
    (r"qwen3\.[5-8]-27b", "qwen3.5-27b"),
    (r"qwen2\.5-coder-0\.5b", "qwen2.5-0.5b"),
    (r"qwen2\.5-(?:coder|math)-1\.5b", "qwen2.5-1.5b"),
    (r"qwen2\.5-coder-3b", "qwen2.5-3b"),
    (r"qwen2\.5-(?:coder|math)-7b", "qwen2.5-7b"),
    (r"qwen2\.5-coder-14b", "qwen2.5-14b"),
    (r"qwen2\.5-coder-32b", "qwen2.5-32b"),
    (r"nemotron-3-super", "nemotron-3-super-120b-a12b-nvfp4"),
    (r"glm-5\.\d-flash", "glm-5.3-flash"),
    (r"glm-5\.3", "glm-5.2"),
    (r"deepseek-v4(?:\.\d)?-flash", "deepseek-v4-flash"),
)


def model_of(text: str) -> ModelSpec | None:
    """The model that a row's text names, None for one that nothing here describes."""
    words = _words(text)
    for pattern, name in _NAMES:
        if _stands_in(pattern, words):
            return _load(name) if name else None
    found = max((name for name in model_names() if _stands_in(re.escape(name), words)), key=len, default=None)
    return None if found is None else _load(found)


def _words(text: str) -> str:
    """A model's name in one spelling: "Qwen 3 8B", "qwen3:8b" and "Qwen3_8B" are all "qwen3-8b"."""
    words = re.sub(r"[\s_:/]+", "-", text.lower())
    words = re.sub(r"(?<![a-z0-9])qwen-(?=[23](?:\.\d+)?-)", "qwen", words)
    return re.sub(r"(?<![a-z0-9])(llama|gemma)(?=\d)", r"\1-", words)


def _stands_in(pattern: str, words: str) -> bool:
    """Whether a whole name is there: "kimi-k2" is not in "kimi-k2.5", nor "llama-7b" in "codellama-7b"."""
    return re.search(rf"(?<![a-z0-9.])(?:{pattern})(?!\.?\d|[a-z])", words) is not None


def _load(name: str) -> ModelSpec:
    built = _BUILT.get(name)
    return load_model(name) if built is None else built


def _gated(hidden: int, width: int) -> int:
    return 3 * hidden * width


def _glm_5_3_flash() -> ModelSpec:
    """GLM-5.3-Flash, 320B with 18B active: every fourth layer sparse MLA, the others a gated delta rule.

    Sizes: https://github.com/hw-native-sys/pypto-lib/blob/32d4558e8705c5cb7de95558bfc186aecc2cb189/models/glm5_3_flash/config.py
    (45 layers, the first three with a dense MLP). Its indexer rates one pooled key for every four tokens: a
    quarter of the width stands for that.
    """
    hidden, heads = 4096, 64
    latent = Latent(rank=512, rotary=0, nope=256, value=256)
    sparse = (
        hidden * 1536 + 1536 * heads * 256 + hidden * 512 + 512 * heads * 512 + heads * 256 * hidden
    ) + (hidden * 128 + 1536 * 32 * 128)
    delta = 5 * hidden * heads * 128
    # A delta-rule step decays, corrects and reads a state of 128 x 128 a head.
    state = State(heads, 128 * 128, 4.0, heads, 3 * 128, 0, 4, flop_per_token=6.0 * heads * 128 * 128)
    experts = Experts(288, 8, _gated(hidden, 2048))
    layers = []
    for at in range(45):
        mlp = _gated(hidden, 12288) if at < 3 else _gated(hidden, 2048)
        routed = None if at < 3 else experts
        if at % 4 == 3:
            index = Indexer(32, 32, 2048)
            layers.append(
                LayerSpec(
                    heads,
                    1,
                    512,
                    0,
                    sparse + mlp,
                    "sparse_latent_attention",
                    latent=latent,
                    indexer=index,
                    experts=routed,
                )
            )
        else:
            layers.append(LayerSpec(0, 0, 0, 0, delta + mlp, "linear_attention", state=state, experts=routed))
    return ModelSpec("glm-5.3-flash", tuple(layers), hidden, 154880, "bf16", "bf16")


def _deepseek_v4_flash() -> ModelSpec:
    """DeepSeek-V4-Flash, 284B with 13B active: attention over keys compressed four or 128 to one.

    Sizes: https://github.com/ai-dynamo/aiconfigurator/blob/095f58a51c4ca8e61b66ec108d86f223f8d559ce/aic-core/src/aiconfigurator_core/model_configs/deepseek-ai--DeepSeek-V4-Flash_config.json
    A row of 512 is K and V at once. Compression is expressed by dividing widths: KV of a layer compressed four
    to one is 128 elements a token, and 64 indexer heads rate a quarter of the keys; the window of 128 beside
    the compressed rows is in the top-k. V4.1-Flash is taken for the same sizes: an assumption.
    """
    hidden, heads = 4096, 64
    weights = (
        hidden * 1024 + 1024 * heads * 512 + hidden * 512 + heads * 512 * 1024 + 8 * 1024 * hidden
    ) + _gated(hidden, 2048)
    experts = Experts(256, 6, _gated(hidden, 2048))
    window = LayerSpec(
        heads, 1, 512, 512, weights, "sliding_attention", window=128, experts=experts, stores_kv=False
    )
    quarter = LayerSpec(
        heads,
        1,
        128,
        0,
        weights + hidden * 128 + 1024 * 64 * 128,
        "sparse_latent_attention",
        latent=Latent(rank=512, rotary=0, nope=512, value=512, compute="absorbed"),
        indexer=Indexer(64, 32, 640),
        experts=experts,
    )
    heavy = LayerSpec(heads, 1, 4, 4, weights, experts=experts)
    layers = [window, window, *(quarter if at % 2 == 0 else heavy for at in range(41))]
    return ModelSpec("deepseek-v4-flash", tuple(layers), hidden, 129280, "fp4", "fp8")


_BUILT: Mapping[str, ModelSpec] = {
    "glm-5.3-flash": _glm_5_3_flash(),
    "deepseek-v4-flash": _deepseek_v4_flash(),
}
