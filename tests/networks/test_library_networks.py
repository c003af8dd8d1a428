"""Networks of the transformers library with random weights give what PyTorch gives, at other sizes than captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from tests.networks.library_networks import SMALL, Case, check_case, free_images, images, sounds, texts


def roberta() -> Case:
    """Padding found from ids: cumulative sums, a mask of attention, a class for each token."""
    config = transformers.RobertaConfig(**SMALL, vocab_size=60, max_position_embeddings=40, pad_token_id=0)
    examples = []
    for b, s in ((2, 7), (3, 12)):
        ids = torch.randint(1, 60, (b, s))
        ids[0, s - 2 :] = 0
        examples.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    shapes = dict.fromkeys(("input_ids", "attention_mask"), ("B", "S"))
    return transformers.RobertaForTokenClassification(config), examples, shapes, {"S": (2, 30)}


def swin() -> Case:
    """Shifted windows: rolls, masks, pads to whole windows, at free sizes."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4, num_labels=5
    )
    return images(transformers.SwinForImageClassification(config))


def dinov2() -> Case:
    """Position embeddings that are resized to the image, bicubic."""
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=56, patch_size=14
    )
    return free_images(transformers.Dinov2Model(config), [(56, 84), (42, 70)], 14)


def segformer() -> Case:
    """Attention over shrunk maps, and maps of four sizes that are resized and joined."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16,
        num_labels=4,
    )  # fmt: skip
    return free_images(transformers.SegformerForSemanticSegmentation(config), [(64, 96), (96, 64)], 32)


def wav2vec2() -> Case:
    """Convolutions of sound, a weight that is normalised, a norm of groups."""
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=[8] * 3, conv_kernel=[10, 3, 2], conv_stride=[5, 2, 2], num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, vocab_size=20,
    )  # fmt: skip
    return sounds(transformers.Wav2Vec2ForCTC(config))


def whisper() -> Case:
    """An encoder and a causal decoder that looks at it."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=50, num_mel_bins=8, max_source_positions=20,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    examples = [
        {"input_features": torch.randn(b, 8, 40), "decoder_input_ids": torch.randint(0, 50, (b, s))}
        for b, s in ((2, 5), (3, 9))
    ]
    shapes = {"input_features": ("B", 8, 40), "decoder_input_ids": ("B", "S")}
    return transformers.WhisperForConditionalGeneration(config), examples, shapes, {"S": (2, 20)}


def clip() -> Case:
    """Texts and images in any numbers, whose vectors are compared with each other."""
    vision = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 16}
    text = {**SMALL, "vocab_size": 60, "max_position_embeddings": 20, "projection_dim": 16}
    text |= {"bos_token_id": 1, "eos_token_id": 59, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    examples = []
    for b, s in ((2, 7), (3, 12)):
        ids = torch.randint(1, 58, (b, s))
        ids[:, -2] = 59
        mask = torch.ones(b, s, dtype=torch.long)
        examples.append({"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(b + 1, 3, 32, 32)})
    shapes = {"input_ids": ("B", "S"), "attention_mask": ("B", "S"), "pixel_values": ("I", 3, 32, 32)}
    return transformers.CLIPModel(config), examples, shapes, {"S": (2, 20)}


def t5() -> Case:
    """An encoder with biases of relative positions in buckets, at any length."""
    config = transformers.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return texts(transformers.T5EncoderModel(config))


def hubert() -> Case:
    """Sound, as wav2vec2 takes it."""
    config = transformers.HubertConfig(
        **SMALL, conv_dim=[8] * 3, conv_kernel=[10, 3, 2], conv_stride=[5, 2, 2], num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, vocab_size=20,
    )  # fmt: skip
    return sounds(transformers.HubertForCTC(config))


def detr() -> Case:
    """A ResNet, a mask that is resized to its map, positions as sines, and queries for boxes, at free sizes."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=6, num_labels=5,
    )  # fmt: skip
    return free_images(transformers.DetrForObjectDetection(config), [(64, 96), (96, 64)], 32)


def vit() -> Case:
    """Patches, a class token, attention."""
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)
    return images(transformers.ViTForImageClassification(config))


def convnext() -> Case:
    """Depthwise 7 x 7, norms over channels, scales of layers, at free sizes."""
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=5)
    return free_images(transformers.ConvNextForImageClassification(config), [(64, 96), (96, 64)], 32)


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (roberta, swin, dinov2, segformer, wav2vec2, whisper, clip, t5, hubert, detr, convnext)
}
QUICK: dict[str, Callable[[], Case]] = {function.__name__: function for function in (vit,)}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_networks_of_the_library(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)


@pytest.mark.parametrize("name", QUICK)
def test_small_networks_of_the_library(name: str, tmp_path: Path) -> None:
    check_case(QUICK[name], tmp_path)
