"""Networks of the transformers library that find boxes and depths give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.networks.library_networks import SMALL, Case, check_case, free_images, images
from tests.support.marks import mostly_exhaustive


def yolos() -> Case:
    """A ViT with tokens for boxes."""
    config = transformers.YolosConfig(
        **SMALL, image_size=[32, 32], patch_size=8, num_detection_tokens=6, num_labels=5,
        use_mid_position_embeddings=False,
    )  # fmt: skip
    return free_images(transformers.YolosForObjectDetection(config), [(32, 48), (48, 32)], 8)


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


class _Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        images = {**SMALL, "image_size": 32, "patch_size": 8}
        words = {**SMALL, "vocab_size": 60, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 59}
        config = transformers.OwlViTConfig(text_config=words, vision_config=images, projection_dim=32)
        self.model = transformers.OwlViTForObjectDetection(config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(input_ids=input_ids, pixel_values=pixel_values)
        return found.logits, found.pred_boxes


def owlvit() -> Case:
    """Boxes for two texts."""
    examples = [{"input_ids": torch.randint(1, 60, (2, 6)), "pixel_values": torch.randn(1, 3, 32, 32)}]
    return _Queries(), examples, {}, {}


def swin2sr() -> Case:
    """Twice as many pixels: windows with cosine attention, and pixels that are shuffled."""
    config = transformers.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[2], num_heads=[2], window_size=4, upscale=2, upsampler="pixelshuffle"
    )
    return images(transformers.Swin2SRForImageSuperResolution(config), 16)


def conditional_detr() -> Case:
    """Queries that look where their reference points say, at free sizes."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.ConditionalDetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=32,
        encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=6, num_labels=5,
    )  # fmt: skip
    module = transformers.ConditionalDetrForObjectDetection(config)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):  # whose maps are else too small to differ
            nn.init.kaiming_normal_(part.weight)
    return free_images(module, [(64, 96), (96, 64)], 32)


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function for function in (yolos, dpt, depth_anything, owlvit, swin2sr, conditional_detr)
}


@pytest.mark.parametrize("name", mostly_exhaustive(CASES, (), ("yolos", "depth_anything")))
def test_networks_of_maps(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)
