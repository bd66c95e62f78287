"""What the columns of other people's tables say, in their spellings, and what leaves a row out."""

import pytest

from kvlane.bench import validate_text as text
from kvlane.bench.validate_text import UnpredictableError
from kvlane.policy.catalog import load_machine, load_model, machine_aliases, machine_names


class TestDevices:
    @pytest.mark.parametrize("name", machine_names())
    def test_our_own_names(self, name):
        assert text.look_up(text.DEVICES, name) == name
        assert text.look_up(text.DEVICES, name.upper().replace("-", "_")) == name
        assert text.look_up(text.DEVICES, f"8x{name.replace('-', ' ')}") == name

    @pytest.mark.parametrize(
        ("alias", "name"), [(alias, name) for name in machine_names() for alias in machine_aliases(name)]
    )
    def test_other_names_of_ours(self, alias, name):
        assert text.look_up(text.DEVICES, alias) == name

    @pytest.mark.parametrize(
        ("gpu", "name"),
        [
            ("H100 SXM5 80GB NVLink", "h100-sxm"),
            ("8x H100 (NVLink)", "h100-sxm"),
            ("8xH100", "h100-sxm"),
            ("H100 SXM5 (PCIe Gen5 host)", "h100-sxm"),
            ("H100-SXM5-80GB", "h100-sxm"),
            ("NVIDIA H100 80GB HBM3", "h100-sxm"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("H100-PCIE-80GB", "h100-pcie"),
            ("H100 (PCIe)", "h100-pcie"),
            ("A100-SXM4-80GB 400W", "a100-sxm-80gb"),
            ("A100-80GB (NVLink 600GB/s, EPYC 7402)", "a100-sxm-80gb"),
            ("A100-PCIE-40GB", "a100-pcie-40gb"),
            ("A100 40GB", "a100-sxm-40gb"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
            ("8xB200", "b200-sxm"),
            ("8xH20", "h20"),
            ("4xL4", "l4"),
            ("2xA10", "a10"),
            ("8xA40", "a40"),
            ("NVIDIA L40S", "l40s"),
            ("GeForce RTX4090", "rtx-4090"),
            ("RTX 6000 Ada Generation", "rtx-6000-ada"),
            ("RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
            ("AMD Instinct MI300X", "mi300x"),
            ("Gaudi-3", "gaudi3"),
            ("Ascend 910B", "ascend-910b"),
        ],
    )
    def test_spellings(self, gpu, name):
        assert text.look_up(text.DEVICES, gpu) == name

    @pytest.mark.parametrize(
        "gpu",
        [
            "NVIDIA L40",
            "RTX 4090 Laptop",
            "RTX 4090 D",
            "RTX 3090 Ti",
            "RTX 4080 SUPER",
            "H100 NVL",
            "H200 NVL",
            "V100-PCIE-32GB",
            "RTX PRO 6000 Max-Q",
            "GB300",
            "MI300A",
            "MI250X",
            "Ascend 910B4",
            "H20-3e",
            "Apple M5 Ultra",
            "SambaNova SN40L",
            "",
        ],
    )
    def test_others_are_not_described(self, gpu):
        assert text.look_up(text.DEVICES, gpu) is None

    @pytest.mark.parametrize("name", sorted({name for _, name in text.DEVICES}))
    def test_every_one_named_is_built_in(self, name):
        assert load_machine(name).name == name


class TestCards:
    @pytest.mark.parametrize(
        ("gpu", "stated", "cards"),
        [
            ("8xH100", "", (8, 1)),
            ("8 x H100", "", (8, 1)),
            ("8×H100", "not stated", (8, 1)),
            ("8xB200", "", (8, 1)),
            ("4xL4", "", (4, 1)),
            ("8xH20", "", (8, 1)),
            ("2xA10", "", (2, 1)),
            ("8xA40", "", (8, 1)),
            ("H100 (8 GPUs)", "", (8, 1)),
            ("8xH100", "1", (1, 1)),
            ("RTX 5090 (PCIe 5 x16)", "", (1, 1)),
            ("H100", "TP4", (4, 1)),
            ("H100", "TP=4", (4, 1)),
            ("H100", "tp 4", (4, 1)),
            ("H100", "tensor parallel 4", (4, 1)),
            ("H100", "tensor_parallel_size=4", (4, 1)),
            ("H100", "4 GPUs", (4, 1)),
            ("H100", "TP8 EP8", (8, 1)),
            ("H100", "TP4 PP1", (4, 1)),
            ("H100", "1 node x 8", (8, 1)),
            ("RTX 3090", "4 (layer split, not TP)", (1, 4)),
        ],
    )
    def test_read(self, gpu, stated, cards):
        assert text.cards(gpu, stated) == cards

    @pytest.mark.parametrize(
        "stated",
        [
            "PP2 TP4",
            "TP4 PP=2",
            "pipeline parallel 2",
            "DP8",
            "EP8",
            "TP4 EP8",
            "TP8 DP8",
            "8 (EP)",
            "2 nodes x 8",
            "2 of 8",
            "0",
            "TP0",
            "some",
            "4/8",
            "1.5",
        ],
    )
    def test_left_out(self, stated):
        with pytest.raises(UnpredictableError, match=r"not described"):
            text.cards("H100", stated)


class TestDtypes:
    @pytest.mark.parametrize(
        ("cell", "dtype"),
        [
            ("W4A16", "int4"),
            ("4bit", "int4"),
            ("4-bit", "int4"),
            ("AWQ", "int4"),
            ("GPTQ", "int4"),
            ("Q4_K_M", "int4"),
            ("Q8_0", "int8"),
            ("W8A8", "int8"),
            ("int8", "int8"),
            ("e4m3", "fp8"),
            ("fp8 (e4m3)", "fp8"),
            ("W8A8 FP8", "fp8"),
            ("F16", "fp16"),
            ("float16", "fp16"),
            ("half", "fp16"),
            ("bfloat16", "bf16"),
            ("MXFP4", "fp4"),
            ("auto", None),
            ("not stated", None),
            ("see issue", None),
            ("", None),
        ],
    )
    def test_weights(self, cell, dtype):
        assert text.look_up(text.WEIGHTS, f"{cell} Llama-3.1-8B-Instruct") == dtype

    @pytest.mark.parametrize("model", ["Qwen3-8B-AWQ", "Llama-3.1-8B.Q4_K_M", "Qwen3-8B-4bit"])
    def test_weights_that_only_the_model_names(self, model):
        assert text.look_up(text.WEIGHTS, f" {model}") == "int4"

    @pytest.mark.parametrize(
        "cell",
        [
            "Q5_K_M",
            "Q6_K",
            "IQ3_XXS",
            "Q2_K",
            "fp32",
            "W8A16",
            "GPTQ-Int8",
            "W4A8",
            "ternary",
            "5.5bpw",
            "BF16 weights, FP8 KV",
        ],
    )
    def test_weights_left_out(self, cell):
        with pytest.raises(UnpredictableError, match=cell):
            text.look_up(text.WEIGHTS, f"{cell} Llama-3.1-8B")

    @pytest.mark.parametrize(
        ("cell", "bytes_an_element"),
        [
            ("int8", 1),
            ("e4m3", 1),
            ("fp8_e5m2", 1),
            ("FP8 MLA", 1),
            ("F16", 2),
            ("bfloat16", 2),
            ("BF16 (not stated)", 2),
            ("fp32", 4),
            ("nvfp4", 0.5625),
            ("Q4_0", 0.5625),
        ],
    )
    def test_kv(self, cell, bytes_an_element):
        dtype = text.look_up(text.KV, cell)
        assert dtype is not None
        model = load_model("llama-3.1-8b")
        assert model.kv_bytes_per_token(dtype, 1) == 32 * 2 * 8 * 128 * bytes_an_element

    @pytest.mark.parametrize("cell", ["", "auto", "not stated", "default"])
    def test_kv_not_stated(self, cell):
        assert text.look_up(text.KV, cell) is None

    @pytest.mark.parametrize("cell", ["int4", "turbo3", "K8V4", "q5_1"])
    def test_kv_left_out(self, cell):
        with pytest.raises(UnpredictableError, match=cell):
            text.look_up(text.KV, cell)


class TestBatches:
    @pytest.mark.parametrize(
        "cell", ["batch 8", "batch=8", "bs8", "bs=8", "batch size 8", "batch_size=8", "BS 8"]
    )
    def test_prompts_in_one_batch(self, cell):
        assert text.prompts_at_once(cell) == 8

    @pytest.mark.parametrize(
        "cell",
        ["", "1", "4", "1 (serial)", "concurrency 8", "concurrency=8", "8 concurrent", "8 clients", "single"],
    )
    def test_clients_are_no_batch(self, cell):
        assert text.prompts_at_once(cell) == 1

    @pytest.mark.parametrize("cell", ["many", "batch 0", "rate 4 req/s", "2-8"])
    def test_left_out(self, cell):
        with pytest.raises(UnpredictableError, match="batch"):
            text.prompts_at_once(cell)


class TestLinks:
    @pytest.mark.parametrize(
        ("cell", "rate"),
        [
            ("50", 50e9),
            ("~50 one direction (text)", 50e9),
            ("200 Gb/s", 25e9),
            ("200 Gbps", 25e9),
            ("~55 GB/s", 55e9),
            ("55 GB/s (measured)", 55e9),
            ("900 MB/s", 0.9e9),
            ("", None),
            ("not stated", None),
        ],
    )
    def test_stated_rates(self, cell, rate):
        assert text.stated_rate(cell) == rate

    @pytest.mark.parametrize(
        "cell",
        [
            "PCIe 5 x16",
            "400G",
            "20-25 GB/s",
            "55 GB/s or 200 Gb/s",
            "64 GB/s both ways",
            "2x200 Gb/s",
            "fast",
        ],
    )
    def test_rates_left_out(self, cell):
        with pytest.raises(UnpredictableError, match="rate"):
            text.stated_rate(cell)

    @pytest.mark.parametrize(
        ("words", "count"),
        [
            ("NVMe x4", 4),
            ("4xNVMe", 4),
            ("4x NVMe Gen4 RAID0", 4),
            ("8 NVMe RAID0", 8),
            ("Gen4 NVMe", 1),
            ("PCIe 5 NVMe", 1),
            ("2 x PCIe Gen5 x4 NVMe", 2),
            ("PCIe 4.0 x4 SSD", 1),
            ("4 TB NVMe", 1),
        ],
    )
    def test_drives(self, words, count):
        assert text.drives(words) == count

    @pytest.mark.parametrize(
        ("words", "rate"),
        [
            ("over 2x400Gb/s", 100e9),
            ("8x400G NICs", 400e9),
            ("100 Gbps", 12.5e9),
            ("100GbE", 12.5e9),
            ("200 Gbit/s RDMA", 25e9),
            ("20 GB/s measured", None),
            ("80 GB of memory", None),
        ],
    )
    def test_networks(self, words, rate):
        assert text.line_rate(words) == rate


class TestEngines:
    @pytest.mark.parametrize(
        ("engine", "family"),
        [
            ("Ollama", "llama_cpp"),
            ("llama-server", "llama_cpp"),
            ("llama-cpp-python", "llama_cpp"),
            ("llamacpp b4500", "llama_cpp"),
            ("trt_llm", "tensorrt_llm"),
            ("trtllm", "tensorrt_llm"),
            ("TRT-LLM", "tensorrt_llm"),
            ("sgl", "sglang"),
            ("SGLang v0.5", "sglang"),
            ("vllm-ascend", "vllm"),
        ],
    )
    def test_families(self, engine, family):
        assert text.engine_family(engine) == family
