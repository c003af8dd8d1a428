"""Networks of the transformers library that find boxes, masks and depths give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.networks.library_networks import SMALL, Case, check_case, free_images, images


def _backbone(*stages: str) -> Any:
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=list(stages),
    )  # fmt: skip


def yolos() -> Case:
    """A ViT with tokens for boxes."""
    config = transformers.YolosConfig(
        **SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=6, num_labels=5,
        use_mid_position_embeddings=False,
    )  # fmt: skip
    return free_images(transformers.YolosForObjectDetection(config), [(32, 48), (48, 32)], 8)


def rt_detr() -> Case:
    """Maps of three sizes, the best queries of them, and deformable attention that samples the maps."""
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_hidden_dim=16, encoder_in_channels=[16, 16, 16], encoder_ffn_dim=24,
        encoder_attention_heads=2, d_model=16, num_queries=7, decoder_in_channels=[16, 16, 16], decoder_ffn_dim=24,
        decoder_layers=2, decoder_attention_heads=2, num_labels=5, anchor_image_size=None,
    )  # fmt: skip
    return images(transformers.RTDetrForObjectDetection(config), 64)


def deformable_detr() -> Case:
    """Deformable attention in encoder and decoder."""
    config = transformers.DeformableDetrConfig(
        backbone_config=_backbone("stage2", "stage3", "stage4"), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=6,
        num_labels=5, disable_custom_kernels=True,
    )  # fmt: skip
    return images(transformers.DeformableDetrForObjectDetection(config), 64)


def dpt() -> Case:
    """Layers of a ViT as maps of four sizes, which become a depth for each pixel."""
    config = transformers.DPTConfig(
        **SMALL | {"num_hidden_layers": 4}, image_size=32, patch_size=8, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8, is_hybrid=False,
    )  # fmt: skip
    return images(transformers.DPTForDepthEstimation(config))


def depth_anything() -> Case:
    """DPT's head over DINOv2, at free sizes."""
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=56, patch_size=14, mlp_ratio=2,
        out_indices=[1, 2, 3, 4], reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=32, neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=8,
        head_hidden_size=8,
    )  # fmt: skip
    return free_images(transformers.DepthAnythingForDepthEstimation(config), [(56, 84), (42, 70)], 14)


def mask2former() -> Case:
    """A decoder of pixels with deformable attention, and masks that limit the attention of queries."""
    backbone = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=16, hidden_dim=32, encoder_feedforward_dim=24,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=24, num_queries=6, num_labels=5,
        use_auxiliary_loss=False,
    )  # fmt: skip
    return images(transformers.Mask2FormerForUniversalSegmentation(config), 64)


def grounding_dino() -> Case:
    """Boxes for words: two encoders that look at each other, and the best queries of the maps."""
    text = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=60
    )
    config = transformers.GroundingDinoConfig(
        backbone_config=_backbone("stage2", "stage3", "stage4"), text_config=text, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24,
        decoder_ffn_dim=24, num_queries=6, max_text_len=16, disable_custom_kernels=True,
    )  # fmt: skip
    examples = [{"pixel_values": torch.randn(b, 3, 64, 64), "input_ids": torch.randint(5, 60, (b, 7))} for b in (2, 3)]
    shapes = {"pixel_values": ("B", 3, 64, 64), "input_ids": ("B", 7)}
    return transformers.GroundingDinoForObjectDetection(config), examples, shapes, {}


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (yolos, rt_detr, deformable_detr, dpt, depth_anything, mask2former, grounding_dino)
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_networks_of_maps(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)
