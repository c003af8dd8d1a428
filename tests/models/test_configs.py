"""Configs of the networks: defaults as transformers has them, and refusals that name the key."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import INFINITY, ConfigReader
from penstock.errors import InvalidFileError, PenstockError, UnsupportedError
from penstock.models.meta import construct_on_meta
from penstock.models.registry import find_network, supported_types
from tests.support.errors import raises

LEAST: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(model_type: str, **changes: Any) -> Any:
    values = {"model_type": model_type} | LEAST | changes
    return find_network(model_type).Config.read(ConfigReader({k: v for k, v in values.items() if v != "missing"}))


def test_the_folder_lists_the_types() -> None:
    assert {"glm4", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3"} <= set(supported_types())
    with raises(UnsupportedError, param="model_type", match="expected one of .*llama, .*qwen3.* got 'gpt9'"):
        find_network("gpt9")
    with raises(UnsupportedError, param="model_type", match=r"got '\.\./registry'"):
        find_network("../registry")


def test_defaults() -> None:
    llama = read("llama")
    assert (llama.num_kv_heads, llama.head_dim, llama.tied, llama.attention_bias, llama.windows[0]) == (
        4,
        16,
        False,
        False,
        0,
    )
    assert read("qwen3").head_dim == 128
    assert read("qwen2").head_dim == 16
    assert read("mistral").windows[0] == 4096
    assert read("mistral", sliding_window=None).windows[0] == 0
    assert read("mistral", sliding_window=64).windows[0] == 64


def test_defaults_of_decoders() -> None:
    glm, smollm3, ernie = read("glm4"), read("smollm3"), read("ernie4_5")
    assert (glm.rope.rotary_dim, glm.head_dim, glm.norm_eps, glm.attention_bias) == (64, 128, 1.5625e-7, True)
    assert (smollm3.rope.theta, smollm3.tied, smollm3.rope_layers) == (2e6, True, (True, True, True, False))
    assert (ernie.rope.theta, ernie.tied, ernie.head_dim, ernie.mlp_bias) == (5e5, True, 128, False)
    assert read("exaone4", sliding_window=8).windows == (8, 8, 8, 0)
    assert read("exaone4", sliding_window=None).rope_layers == (True,) * 4
    assert read("olmo3").windows == (4096, 4096, 4096, 0)
    assert read("phi3").norm_eps == read("olmo2").norm_eps == read("hunyuan_v1_dense").norm_eps == 1e-5
    assert read("seed_oss").attention_bias
    assert not read("seed_oss").out_bias
    clips = (read("olmo").clip, read("olmo", clip_qkv=8).clip, read("olmoe", num_experts=8, clip_qkv=3.5).clip)
    assert clips == (0.0, 8.0, 3.5)
    apertus = read("apertus", hidden_act="xielu")
    assert (apertus.rope.type, apertus.rope.theta, apertus.context_len) == ("llama3", 12e6, 65536)
    assert read("apertus", hidden_act="xielu", rope_parameters={"rope_type": "default"}).rope.type == "default"


def test_forms_of_families_with_their_own_code() -> None:
    assert read("internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}).rope.type == "default"
    internlm3 = read("internlm3", rope_scaling={"rope_type": "dynamic", "factor": 6.0}, qkv_bias=True, head_dim=24)
    assert (internlm3.rope.type, internlm3.context_len, internlm3.head_dim) == ("default", 32768, 24)
    assert (internlm3.attention_bias, internlm3.out_bias, internlm3.mlp_bias) == (True, False, False)
    internlm = read("internlm", rotary={"base": 500.0, "type": "dynamic"}, bias=False)
    assert (internlm.rope.theta, internlm.attention_bias, read("internlm").attention_bias) == (500.0, False, True)
    assert (read("baichuan").alibi, read("baichuan", max_position_embeddings=99).alibi) == (True, False)
    assert (read("baichuan").unit_head, read("baichuan", vocab_size=125696).unit_head) == (False, True)
    published = {"n_embd": 96, "n_inner": 70, "n_layer": 2, "n_head": 6, "n_positions": 512, "rotary_emb_base": 1000}
    nomic = read("nomic_bert", **published)
    assert (nomic.hidden_size, nomic.intermediate_size, nomic.num_layers, nomic.rope.theta) == (96, 70, 2, 1000.0)
    chatglm = read("chatglm", num_layers=3, ffn_hidden_size=70, rope_ratio=500, padded_vocab_size=1024)
    assert (chatglm.rope.theta, chatglm.rope.rotary_dim, chatglm.vocab_size) == (5e6, 8, 1024)


def test_lfm2_configs_of_its_own_kind() -> None:
    """Those of the published folders state the layers, the width and tied weights under other names."""
    config = read("lfm2", num_key_value_heads=2, full_attn_idxs=[1, 3], block_ff_dim=100, tie_embedding=False)
    assert config.is_attention == (False, True, False, True)
    assert (config.intermediate_size, config.tied, config.rope.theta) == (256, False, 1000000.0)
    assert read("lfm2", num_key_value_heads=2).is_attention == (True,) * 4


def test_defaults_of_gpt_oss() -> None:
    config = read("gpt_oss", num_local_experts=8)
    decoder, routing = config.mixture.decoder, config.mixture.routing
    assert (config.alpha, config.limit, routing.k, routing.score) == (1.702, 7.0, 4, "softmax_of_chosen")
    assert (decoder.windows, decoder.head_dim, decoder.attention_bias) == ((128, 0, 128, 0), 64, True)
    assert (decoder.rope.type, decoder.rope.theta, decoder.rope.factor) == ("yarn", 150000.0, 32.0)
    assert not decoder.rope.truncate


def test_mixtures_by_layer() -> None:
    sizes = {"moe_num_experts": 8, "moe_intermediate_size": 48}
    ernie = read("ernie4_5_moe", **sizes, moe_layer_end_index=2, moe_layer_interval=2)
    assert (ernie.sparse, ernie.expert_size, ernie.shared_size) == ((False, True, False, False), 48, 96)
    assert (ernie.decoder.tied, ernie.decoder.rope.theta, ernie.routing.k) == (True, 500000.0, 6)
    hunyuan = read("hunyuan_v1_moe", num_experts=[4] * 4, moe_topk=[2] * 4, moe_intermediate_size=[96] * 4)
    assert (hunyuan.num_experts, hunyuan.routing.k, hunyuan.shared_size) == (4, 2, 96)


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    config = read("deepseek_v3", num_nextn_predict_layers=2, **LATENT)
    assert config.mixture.unread == ("model.layers.4.*", "model.layers.5.*")
    glm = read("glm4_moe", num_nextn_predict_layers=1, moe_intermediate_size=20, n_routed_experts=16)
    assert glm.unread == ("model.layers.4.*",)
    assert read("deepseek_v3", **LATENT).mixture.unread == ()


def test_latent_sizes() -> None:
    latent = read("kimi_k2", q_lora_rank=None, n_group=1, topk_group=1, **LATENT).latent
    assert (latent.query_rank, latent.latent_dim, latent.nope_dim, latent.rope_dim) == (0, 512, 128, 64)
    assert latent.scale == 192**-0.5
    yarn = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaled = read("deepseek_v3", rope_scaling=yarn | {"original_max_position_embeddings": 4096}, **LATENT).latent
    assert scaled.scale == pytest.approx(192**-0.5 * 1.3688879454**2)


def test_mistral4_ends_where_its_queries_are_scaled() -> None:
    assert read("mistral4", **LATENT).context_len == 8192
    assert read("mistral4", rope_parameters={"rope_type": "default"}, **LATENT).context_len == 1048576


def test_longrope_has_one_table_for_the_planned_context() -> None:
    tables = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [9.0 + i for i in range(8)]}
    sizes = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    for planned, context_len, table in ((None, 512, "short"), (256, 256, "short"), (513, 513, "long")):
        config = read("phi3", rope_scaling={"type": "su", **tables}, planned_context_len=planned, **sizes)
        assert config.context_len == context_len
        assert list(config.rope.divisors) == tables[f"{table}_factor"]
        assert config.rope.attention_factor == pytest.approx((1 + 3 / 9) ** 0.5)  # log(8) / log(512)


def test_longrope_of_minicpm_spans_the_whole_context() -> None:
    """The config of MiniCPM 4 and that of MiniCPM 3 have one, whose short table is for every position."""
    rope = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [9.0] * 8}
    own = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32, "max_position_embeddings": 512}
    config = read("minicpm", rope_scaling=rope, **own).decoder
    assert (config.context_len, config.rope.divisors, config.rope.attention_factor) == (512, (1.5,) * 8, 1.0)
    latent = read("minicpm3", rope_scaling=rope | {"type": "longrope"}, qk_rope_head_dim=16, **own).decoder
    assert (latent.context_len, latent.rope.divisors) == (512, (1.5,) * 8)


def test_sizes_of_mamba() -> None:
    granite = read("granitemoehybrid", layer_types=["mamba", "attention"] * 2, **GRANITE)
    assert (granite.kinds, granite.mixture, granite.rope) == (("mamba", "attention") * 2, None, False)
    assert (granite.mamba.head_dim, granite.mamba.state_dim, granite.mamba.groups) == (16, 256, 1)
    assert read("falcon_h1", mamba_d_ssm=None, **FALCON_H1).mamba.width == 128
    nemotron = read("nemotron_h", hybrid_override_pattern="M-*E", moe_latent_size=48, num_key_value_heads=4)
    assert nemotron.kinds == ("mamba", "mlp", "attention", "moe")
    assert (nemotron.mamba.width, nemotron.mamba.groups, nemotron.latent_size) == (8192, 8, 48)


def test_steps_without_an_upper_bound() -> None:
    largest = (2 - 2**-23) * 2.0**127
    for limits in (None, [0.0, INFINITY]):
        mamba = read("granitemoehybrid", time_step_limit=limits, **GRANITE).mamba
        assert mamba.step_limits == (0.0, largest)
    assert read("granitemoehybrid", time_step_limit=[0.5, 2], **GRANITE).mamba.step_limits == (0.5, 2.0)


def test_windows_by_layer() -> None:
    assert read("qwen2", sliding_window=8).windows == (0, 0, 0, 0)
    assert read("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3).windows == (0, 0, 0, 8)
    kinds = ["full_attention", "sliding_attention"] * 2
    assert read("qwen3", sliding_window=8, use_sliding_window=True, layer_types=kinds).windows == (0, 8, 0, 8)


GRANITE: dict[str, Any] = {"mamba_n_heads": 8, "num_local_experts": 0}
FALCON_H1: dict[str, Any] = {"mamba_n_heads": 8, "num_key_value_heads": 4}
LATENT: dict[str, Any] = {"n_routed_experts": 64, "moe_intermediate_size": 20}

BAD = {
    "v3_topk_method": ("deepseek_v3", {"topk_method": "greedy"}, "noaux_tc, got 'greedy'"),
    "v3_scoring": ("deepseek_v3", {"scoring_func": "softmax"}, "sigmoid, got 'softmax'"),
    "v3_frequency": ("deepseek_v3", {"moe_layer_freq": 2}, "1, got 2"),
    "v3_groups": ("deepseek_v3", {"topk_group": 9, **LATENT}, "1 to 8"),
    "v3_row": ("deepseek_v3", {"kv_lora_rank": 1000}, "1024 at most"),
    "v3_heads": ("deepseek_v3", {"num_key_value_heads": 2}, "num_attention_heads"),
    "v3_rope": ("deepseek_v3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling: .*dynamic"),
    "activation": ("llama", {"hidden_act": "relu"}, "silu, got 'relu'"),
    "missing": ("llama", {"hidden_size": "missing"}, "missing"),
    "heads": ("qwen2", {"num_key_value_heads": 3}, r"\(4\), got 3"),
    "rope": ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: .*dynamic"),
    "llama_window": ("llama", {"sliding_window": 5}, "null"),
    "layer_types_len": ("qwen2", {"layer_types": ["full_attention"]}, "4 layers, got 1"),
    "layer_types_kind": ("qwen2", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
    "layer_types_window": (
        "qwen3",
        {"layer_types": ["sliding_attention"] * 4},
        "sliding_window .*not set",
    ),
    "falcon_alibi": ("falcon", {"alibi": "yes"}, "true or false"),
    "cohere2_qk_norm": ("cohere2", {"use_qk_norm": True}, "false, got true"),
    "minicpm_experts": ("minicpm", {"num_experts": 8}, "got 8"),
    "minicpm_factor": ("minicpm", {"scale_emb": 1.0, "scale_depth": "missing"}, "scale_depth.*missing"),
    "minicpm_sparse": ("minicpm", {"sparse_config": {"kernel_size": 32}}, "null, got an object"),
    "internlm_rotary": ("internlm", {"rotary": {"base": 10000, "dim": 4}}, "dim: expected base"),
    "internlm2_rope": ("internlm2", {"rope_scaling": {"type": "yarn"}}, "dynamic, linear, got 'yarn'"),
    "internlm3_bias": ("internlm3", {"qkv_bias": 1}, "true or false"),
    "internlm2_bias": ("internlm2", {"bias": "no"}, "true or false"),
    "baichuan_heads": ("baichuan", {"num_key_value_heads": 2}, r"\(4\), got 2"),
    "chatglm_1": ("chatglm", {"position_encoding_2d": True}, "false, got true"),
    "chatglm_norm": ("chatglm", {"rmsnorm": False}, "true, got false"),
    "chatglm_prefix": ("chatglm", {"pre_seq_len": 128}, "0 or null, got 128"),
    "chatglm_groups": (
        "chatglm",
        {"multi_query_group_num": 3, "multi_query_attention": True},
        "a divisor of 4 heads, got 3",
    ),
    "eurobert_tokens": ("eurobert", {"architectures": ["EuroBertForQuestionAnswering"]}, "EuroBertForMaskedLM"),
    "apertus_activation": ("apertus", {"hidden_act": "silu"}, "xielu, got 'silu'"),
    "apertus_norm": ("apertus", {"qk_norm": False}, "true, got false"),
    "olmoe_clip": ("olmoe", {"clip_qkv": 0, "num_experts": 8}, "got 0"),
    "olmo_clip": ("olmo", {"clip_qkv": -8.0}, "got -8"),
    "nomic_norm": ("nomic_bert", {"prenorm": True}, "false, got true"),
    "nomic_activation": ("nomic_bert", {"n_embd": 64, "n_head": 4, "activation_function": "gelu"}, "swiglu"),
    "nomic_rope": ("nomic_bert", {"n_embd": 64, "n_head": 4, "rotary_emb_fraction": 0.5}, "1, got 0.5"),
    "nomic_class": ("nomic_bert", {"architectures": ["NomicBertForMaskedLM"]}, "NomicBertModel"),
    "gemma2_activation": ("gemma2", {"hidden_activation": "relu"}, "gelu_pytorch_tanh, got 'relu'"),
    "gemma3_cap": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "null, got 50"),
    "phi_activation": ("phi", {"hidden_act": "silu"}, "gelu_new.*got 'silu'"),
    "layers": ("llama", {"num_hidden_layers": 2**31 - 1}, "1 to 1024, "),
    "qwen_layers": ("qwen2", {"num_hidden_layers": 2**31 - 1}, "1 to 1024, "),
    "head_dim": ("qwen3", {"head_dim": 2**31 - 2}, "even .* 2 to 1024, "),
    "longrope": ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7}}, "8 numbers"),
    "longrope_long": (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 64},
            "planned_context_len": 65,
        },
        "8 numbers",
    ),
    "longrope_planned": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}, "planned_context_len": 0},
        "an integer from 1 to ",
    ),
    "longrope_key": (
        "phi3",
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "short_mscale": 1.1}},
        "short_mscale",
    ),
    "longrope_llama": ("llama", {"rope_scaling": {"type": "longrope"}}, "longrope"),
    "olmo3_ropes": (
        "olmo3",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}},
        "differ between layer types",
    ),
    "rope_layers": ("smollm3", {"no_rope_layers": [1, 0]}, "4 layers, got 2"),
    "rope_layer": ("smollm3", {"no_rope_layers": [1, 0, 2, 0]}, "0 to 1"),
    "exaone_pattern": ("exaone4", {"sliding_window_pattern": "LLLG"}, "'LLLG'"),
    "exaone_types": ("exaone4", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    "hunyuan_alpha": ("hunyuan_v1_dense", {"rope_scaling": {"type": "yarn", "alpha": 10.0}}, "yarn"),
    "ernie_bias": ("ernie4_5", {"use_bias": 1}, "true or false"),
    "seed_bias": ("seed_oss", {"attention_out_bias": "no"}, "true or false"),
    "glm_activation": ("glm", {"hidden_act": "gelu"}, "silu, got 'gelu'"),
    "glm4_share": ("glm4", {"partial_rotary_factor": 2.0}, "0 to 1"),
    "olmo2_activation": ("olmo2", {"hidden_act": "relu"}, "silu, got 'relu'"),
    "lfm2_layer_types": ("lfm2", {"layer_types": ["mamba"] * 4, "num_key_value_heads": 4}, "or conv, got"),
    "lfm2_conv_len": ("lfm2", {"conv_L_cache": 33, "num_key_value_heads": 4}, "1 to 32"),
    "lfm2_heads": ("lfm2", {"num_key_value_heads": 3}, "got 3"),
    "lfm2_width": ("lfm2", {"hidden_size": 65, "num_key_value_heads": 4}, "even"),
    "gpt_oss_activation": ("gpt_oss", {"hidden_act": "gelu", "num_local_experts": 8}, "silu, got 'gelu'"),
    "gpt_oss_experts": ("gpt_oss", {"num_local_experts": 3}, "at least 4"),
    "gpt_oss_limit": ("gpt_oss", {"swiglu_limit": 0, "num_local_experts": 8}, "got 0"),
    "gpt_oss_layers": ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    "gpt_oss_window": ("gpt_oss", {"layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "not set"),
    "granitemoe_experts": ("granitemoe", {"num_local_experts": 1}, "at least 2"),
    "ernie_experts": ("ernie4_5_moe", {"moe_num_experts": 5, "moe_intermediate_size": 48}, "at least 6"),
    "ernie_norm_min": ("ernie4_5_moe", {"moe_norm_min": 0.1, "moe_num_experts": 8}, "0 to 1e-09"),
    "ernie_end": ("ernie4_5_moe", {"moe_layer_end_index": -2, "moe_num_experts": 8}, "-1 to"),
    "hunyuan_experts": ("hunyuan_v1_moe", {"num_experts": [4, 4, 8, 8]}, "8 in every layer"),
    "hunyuan_topk": ("hunyuan_v1_moe", {"moe_topk": [1, 2, 1, 1], "num_experts": 4}, "2 in every layer"),
    "hunyuan_shared": ("hunyuan_v1_moe", {"num_shared_expert": [2] * 4, "num_experts": 4}, "1 in every layer"),
    "hunyuan_width": ("hunyuan_v1_moe", {"moe_intermediate_size": 48, "num_experts": 4}, "96 in every layer"),
    "hunyuan_cla": ("hunyuan_v1_moe", {"use_cla": True, "num_experts": 4}, "false, got true"),
    "delta_layer_types": ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "full_attention or linear_attention"),
    "delta_heads": ("qwen3_5_text", {"linear_num_value_heads": 24}, r"a multiple of linear_num_key_heads \(16\)"),
    "delta_gate": ("qwen3_5_text", {"attn_output_gate": False}, "true, got false"),
    "delta_conv": ("qwen3_5_text", {"linear_conv_kernel_dim": 64}, "1 to 32"),
    "delta_head_dim": ("qwen3_next", {"linear_key_head_dim": 1024}, "1 to 512"),
    "granite_hybrid_types": ("granitemoehybrid", {"layer_types": ["conv"] * 4, **GRANITE}, "mamba, .*got 'conv'"),
    "granite_hybrid_layers": ("granitemoehybrid", {"layer_types": ["mamba"] * 3, **GRANITE}, "4 layers, got 3"),
    "granite_hybrid_norm": ("granitemoehybrid", {"normalization_function": "layernorm"}, "'rmsnorm', got"),
    "granite_hybrid_heads": ("granitemoehybrid", {"mamba_d_head": 17, **GRANITE}, "128 channels divided by 8 heads"),
    "granite_hybrid_position": ("granitemoehybrid", {"position_embedding_type": "alibi", **GRANITE}, "rope, nope"),
    "granite_hybrid_limit": ("granitemoehybrid", {"time_step_limit": [1.0, 0.5], **GRANITE}, "ascending"),
    "falcon_h1_factors": ("falcon_h1", {"ssm_multipliers": [1.0] * 4, "mamba_d_ssm": 128, **FALCON_H1}, "5 numbers"),
    "falcon_h1_groups": ("falcon_h1", {"mamba_n_groups": 3, "mamba_d_ssm": 128, **FALCON_H1}, "a divisor of"),
    "falcon_h1_conv": ("falcon_h1", {"mamba_d_conv": 33, "mamba_d_ssm": 128, **FALCON_H1}, "1 to 32"),
    "bamba_layers": ("bamba", {"attn_layer_indices": [4], **FALCON_H1}, "0 to 3"),
    "nemotron_pattern": ("nemotron_h", {"hybrid_override_pattern": "M-X*"}, "M, .*got 'X'"),
    "nemotron_layers": ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "4 layers, got 3"),
    "nemotron_activation": ("nemotron_h", {"mlp_hidden_act": "silu"}, "relu2, got 'silu'"),
    "nemotron_shared": ("nemotron_h", {"n_shared_experts": 2}, "1, got 2"),
    "nemotron_bias": ("nemotron_h", {"attention_bias": True}, "false, got true"),
    "nemotron_state": (
        "nemotron_h",
        {"ssm_state_size": 1024, "hybrid_override_pattern": "M-M*", "num_key_value_heads": 4},
        "1 to 512",
    ),
    "window_type": ("mistral", {"sliding_window": "4k"}, "'4k'"),
}


PARAMS = {
    "rope": "rope_type",
    "v3_rope": "type",
    "longrope": "short_factor",
    "longrope_long": "long_factor",
    "longrope_planned": "planned_context_len",
    "longrope_key": "short_mscale",
    "longrope_llama": "type",
    "olmo3_ropes": None,
    "hunyuan_alpha": "type",
    "minicpm_factor": "scale_depth",
    "nomic_activation": "activation_function",
    "nomic_rope": "rotary_emb_fraction",
    "internlm_rotary": "dim",
    "internlm2_rope": "type",
}
"""The field of the error, where it is not the key of ``BAD``."""


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused_by_key(name: str) -> None:
    model_type, changes, fact = BAD[name]
    with raises(PenstockError, param=PARAMS.get(name, next(iter(changes))), match=fact) as caught:
        read(model_type, **changes)
    assert isinstance(caught.value, InvalidFileError | UnsupportedError)


def test_sizes_that_no_network_has_are_refused() -> None:
    sizes = {"model_type": "llama", "hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "head_dim": 16}
    with raises(InvalidFileError, param="weight", match=r"config\.json: .* 2\^44"):
        construct_on_meta(ConfigReader(LEAST | sizes))
