"""The keyword arguments of LLM: its own, those of other engines, and sampling as keywords."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import penstock
from penstock import (
    LLM,
    AsyncLLM,
    InvalidArgumentError,
    PenstockError,
    ProgramLimits,
    SamplingParams,
    UnsupportedError,
    pipeline,
)
from penstock.llm.llm_options import check_quantization, network_name, read_llm_options
from tests.support.command import DEMO
from tests.support.errors import raises


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, context_len=128) as opened:
        yield opened


def test_limits_are_keywords():
    options = read_llm_options({"context_len": 64, "max_requests": 1024, "kv_cache": "int8"}, None, None)
    assert options.limits == ProgramLimits(
        context_len=64, max_requests=1024, max_tokens=1024, kv_layout="int8", weights="mmap"
    )
    assert read_llm_options({}, None, None).limits is None
    with LLM(DEMO, kv_cache="int8", context_len=64, max_requests=2) as llm:
        assert llm.engine.max_len == 64
        assert llm.engine.program.limits.kv_layout == "int8"


def test_names_of_other_engines_work():
    given = {"max_model_len": 64, "max_num_seqs": 2, "enable_prefix_caching": False, "tensor_parallel_size": 1}
    options = read_llm_options(given | {"trust_remote_code": False, "dtype": "auto", "device": "cpu"}, None, None)
    assert (options.limits.context_len, options.limits.max_requests) == (64, 2)
    assert options.engine.prefix_cache is False
    assert read_llm_options({"dtype": "bfloat16"}, None, None).scheme == "bf16"
    assert read_llm_options({"torch_dtype": "auto"}, None, "w8a8").scheme == "w8a8"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"trust_remote_code": True}, "network='file.py:Class'"),
        ({"quantization": "awq"}, "scheme='w8a8'"),
        ({"gpu_memory_utilization": 0.9}, "context_len=N"),
        ({"enforce_eager": True}, "mode='eager'"),
        ({"device": "cuda"}, "CPU"),
        ({"seed": 3}, "SamplingParams"),
        ({"dtype": "int4"}, "auto"),
        ({"max_model_len": 4, "context_len": 4}, "max_model_len and context_len"),
        ({"contxt_len": 4}, "context_len"),
        ({"num_pages": 4}, "ProgramLimits"),
        ({"kv_cache": "fp8"}, "auto"),
        ({"max_requests": "many"}, "'many'"),
        ({"frob": 1}, "scheme, mode"),
        ({"context_len": 4, "limits": ProgramLimits()}, "limits"),
        ({"network": 3}, "got 3"),
    ],
)
def test_an_option_that_does_not_work_names_ours(options, hint):
    with raises((InvalidArgumentError, UnsupportedError), param=next(iter(options)), match=hint):
        LLM(DEMO, **options)


def test_quantization_may_name_the_method_of_the_files(tmp_path):
    def folder(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    for method in ("awq", "compressed-tensors"):
        stored = folder(quantization_config={"quant_method": method})
        for same in (None, method, f"{method}_marlin"):
            check_quantization(same, stored)
        with raises(UnsupportedError, param="quantization", match=f"None or '{method}'.* got 'gptq'"):
            check_quantization("gptq", stored)
    stored = folder(quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    for same in ("modelopt", "ModelOpt", "fp8"):
        check_quantization(same, stored)
    stored = folder(quantization_config={"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"})
    for same in ("auto-round", "awq"):
        check_quantization(same, stored)
    for file, section, same in (
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "awq"),
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ):
        path = folder() / file
        path.write_text(json.dumps(section))
        save_file({"a.weight": np.zeros((1, 1), np.float32)}, tmp_path / "model.safetensors")
        with raises(UnsupportedError, param="quantization", match="not quantized"):
            check_quantization(same, tmp_path)
        save_file({"a.qweight": np.zeros((1, 1), np.int32)}, tmp_path / "model.safetensors")
        check_quantization(same, tmp_path)
        with raises(UnsupportedError, param="quantization", match="got 'bitsandbytes'"):
            check_quantization("bitsandbytes", tmp_path)
        path.unlink()
    check_quantization("gguf", tmp_path / "model.gguf")
    for wrong, hint in (("awq", "scheme='w8a8' or"), ("w4a8", "scheme='w4a8' quantizes"), (4, "got 4")):
        with raises(UnsupportedError, param="quantization", match=f"not quantized.*{hint}"):
            check_quantization(wrong, folder())


def test_a_network_may_be_a_class():
    class Inner(torch.nn.Module):
        pass

    for wrong in (Inner, type("Made", (torch.nn.Module,), {})):
        with raises(InvalidArgumentError, param="network", match=r"^network: \S*(Inner|Made) "):
            network_name(wrong)
    with raises(InvalidArgumentError, param="network", match=r"torch\.nn\.Module"):
        network_name(int)
    assert network_name(torch.nn.Linear).endswith("linear.py:Linear")
    assert network_name("file.py:Net") == "file.py:Net"
    assert network_name(None) is None


def test_sampling_may_be_keywords(llm):
    params = SamplingParams(max_tokens=4, temperature=0)
    expected = llm.generate("import os\n", params)
    assert llm.generate("import os\n", max_tokens=4, temperature=0).text == expected.text
    assert llm.generate("import os\n", max_new_tokens=4, do_sample=False).text == expected.text
    assert llm.generate("import os\n", sampling_params=params).text == expected.text
    assert [one.text for one in llm.generate(["import os\n"], max_tokens=4, temperature=0)] == [expected.text]
    pieces = llm.stream("import os\n", max_tokens=4, temperature=0)
    assert "".join(delta.text for delta in pieces) == expected.text
    with pipeline("text-generation", llm) as generate:
        assert generate("import os\n", max_new_tokens=4, do_sample=False).text == expected.text
        with raises(InvalidArgumentError, param="max_new_token", match="^text_generation "):
            generate("x", max_new_token=4)
    for keywords, hint in (
        ({"max_token": 4}, "^generate .* max_tokens"),
        ({"max_tokens": 4, "params": params}, "params"),
        ({"params": params, "sampling_params": params}, "params and sampling_params"),
        ({"max_tokens": 0}, "got 0"),
        ({"frob": 0}, "max_tokens, "),
    ):
        with raises(PenstockError, param=next(iter(keywords)), match=hint):
            llm.generate("x", **keywords)


def test_async_llm_opens_a_path_and_iterates_without_await(llm):
    keywords = {"max_tokens": 4, "temperature": 0}
    expected = llm.generate("import os\n", **keywords).text

    async def use() -> None:
        async with AsyncLLM(str(DEMO), context_len=128) as opened:
            assert "".join([delta.text async for delta in opened.stream("import os\n", **keywords)]) == expected
            stream = await opened.stream("import os\n", SamplingParams(**keywords))
            async for _ in stream:
                pass
            assert stream.result().text == expected
            assert (await opened.generate("import os\n", **keywords)).text == expected
            with raises(InvalidArgumentError, param="context_len"):
                AsyncLLM(opened.llm, context_len=4)
        async with AsyncLLM.open(DEMO) as opened:
            assert (await opened.generate("import os\n", **keywords)).text == expected

    asyncio.run(use())


def test_a_name_that_is_no_path_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(penstock.FileAccessError, match="penstock pull org/name"):
        LLM("org/name")


def test_wrong_token_ids_are_refused_by_name(llm):
    for wrong in (["a"], None, 3, [1 << 40]):
        with raises(InvalidArgumentError, param="ids"):
            llm.tokenizer.decode(wrong)
