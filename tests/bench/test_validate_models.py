"""Which model a row's text names, and the sizes of the built-in ones."""

import pytest

from kvlane.bench.validate_models import model_of
from kvlane.policy.catalog import load_model, model_names


class TestModels:
    @pytest.mark.parametrize("name", model_names())
    def test_our_own_names(self, name):
        model = model_of(name)
        assert model is not None
        assert model.layers == load_model(name).layers

    @pytest.mark.parametrize(
        ("words", "name"),
        [
            ("DeepSeek-R1-Distill-Llama-8B", "llama-3.1-8b"),
            ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
            ("DeepSeek-R1", "deepseek-r1"),
            ("DeepSeek-R1-0528", "deepseek-r1"),
            ("Kimi-K2-Instruct", "kimi-k2"),
            ("Mistral-7B-v0.1", "mistral-7b"),
            ("Mistral 7B", "mistral-7b"),
            ("Mistral-7B-v0.3", "mistral-7b-v0.3"),
            ("Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),
            ("Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
            ("Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
            ("Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-24b"),
            ("Qwen 3 8B", "qwen3-8b"),
            ("qwen_3_8b", "qwen3-8b"),
            ("Qwen 2.5 7B Instruct", "qwen2.5-7b"),
            ("Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
            ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
            ("Qwen2.5-14B-Instruct-AWQ", "qwen2.5-14b"),
            ("Qwen3-14B", "qwen3-14b"),
            ("Qwen3-Next-80B-A3B-Instruct-FP8", "qwen3-next-80b-a3b"),
            ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
            ("Llama 3.1 8B Instruct", "llama-3.1-8b"),
            ("llama3.1:8b", "llama-3.1-8b"),
            ("Llama-3.1-8B.Q4_K_M.gguf", "llama-3.1-8b"),
            ("Llama-2-13b-chat-hf", "llama-2-13b"),
            ("Llama-3.1-405B-Instruct", "llama-3.1-405b"),
            ("gemma-3-27b-it", "gemma-3-27b"),
            ("gemma3:27b", "gemma-3-27b"),
        ],
    )
    def test_spellings(self, words, name):
        model = model_of(words)
        assert model is not None
        assert model.layers == load_model(name).layers

    @pytest.mark.parametrize(
        "words",
        [
            "DeepSeek-R1-Distill-Qwen-7B",
            "DeepSeek-R1-Distill-Llama-70B",
            "DeepSeek-R1-0528-Qwen3-8B",
            "Kimi-K2.5",
            "DeepSeek-V3.3",
            "CodeLlama-7B",
            "Mistral-7B-v0.4",
            "Mistral-Small-Instruct-2409",
            "Qwen3-VL-4B",
            "Qwen2.5-VL-7B",
            "Gemma-4 (variant in PR)",
            "Mystery-9B",
            "",
        ],
    )
    def test_others_are_not_described(self, words):
        assert model_of(words) is None

    @pytest.mark.parametrize(
        ("name", "total"),
        [
            ("qwen2.5-0.5b", 0.49e9),
            ("qwen2.5-1.5b", 1.54e9),
            ("qwen2.5-3b", 3.09e9),
            ("qwen2.5-7b", 7.62e9),
            ("qwen2.5-14b", 14.77e9),
            ("qwen3-14b", 14.77e9),
            ("llama-2-13b", 13.02e9),
            ("mistral-7b-v0.2", 7.24e9),
            ("mistral-7b-v0.3", 7.25e9),
            ("mistral-nemo-12b", 12.25e9),
            ("mistral-small-24b", 23.57e9),
            ("gemma-3-27b", 27.0e9),
            ("qwen3-next-80b-a3b", 79.7e9),
        ],
    )
    def test_built_in_ones_have_the_sizes_their_makers_state(self, name, total):
        model = load_model(name)
        tied = name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "gemma-3-27b")
        words = (1 if tied else 2) * model.hidden * model.vocab
        assert sum(layer.all_weights for layer in model.layers) + words == pytest.approx(total, rel=0.01)
