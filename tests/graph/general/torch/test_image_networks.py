"""Classifiers and encoders of images of the transformers library give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.networks.library_networks import SMALL, Case, check_case, free_images, images
from tests.support.marks import mostly_exhaustive


def deit() -> Case:
    """Two tokens of classes, whose two heads are averaged."""
    config = transformers.DeiTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)
    return images(transformers.DeiTForImageClassificationWithTeacher(config))


def beit() -> Case:
    """Biases of relative positions, and scales of layers."""
    config = transformers.BeitConfig(
        **SMALL, image_size=32, patch_size=8, num_labels=5, use_relative_position_bias=True,
        use_shared_relative_position_bias=True,
    )  # fmt: skip
    return images(transformers.BeitForImageClassification(config))


def convnextv2() -> Case:
    """Global response norms, at free sizes."""
    config = transformers.ConvNextV2Config(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_labels=5)
    return free_images(transformers.ConvNextV2ForImageClassification(config), [(64, 96), (96, 64)], 32)


def siglip() -> Case:
    """An encoder of images, whose vectors a query of attention joins."""
    config = transformers.SiglipVisionConfig(**SMALL, image_size=32, patch_size=8)
    return images(transformers.SiglipVisionModel(config))


class SamImages(nn.Module):
    """The part of SAM that encodes an image once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder = model.vision_encoder

    def forward(self, pixel_values: Tensor) -> Tensor:
        found: Tensor = self.encoder(pixel_values).last_hidden_state
        return found


def _sam() -> transformers.SamModel:
    vision = transformers.SamVisionConfig(
        hidden_size=32, output_channels=16, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8,
        window_size=3, global_attn_indexes=[1], num_pos_feats=8, mlp_dim=48, initializer_range=0.05,
    )  # fmt: skip
    prompts = transformers.SamPromptEncoderConfig(hidden_size=16, image_size=64, patch_size=8, mask_input_channels=8)
    decoder = transformers.SamMaskDecoderConfig(
        hidden_size=16, mlp_dim=32, num_attention_heads=4, iou_head_hidden_dim=16
    )  # fmt: skip
    config = transformers.SamConfig(
        vision_config=vision.to_dict(), prompt_encoder_config=prompts.to_dict(), mask_decoder_config=decoder.to_dict()
    )
    return transformers.SamModel(config)


def sam_images() -> Case:
    """Windows that are padded, and decomposed biases of relative positions."""
    return images(SamImages(_sam()), 64)


class SamMasks(nn.Module):
    """The part of SAM that finds masks for points."""

    def __init__(self, model: transformers.SamModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image_embeddings: Tensor, input_points: Tensor, input_labels: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(image_embeddings=image_embeddings, input_points=input_points, input_labels=input_labels)
        return found.pred_masks, found.iou_scores


def sam_masks() -> Case:
    """Points in any number, a decoder of masks with transposed convolutions."""
    examples = [
        {
            "image_embeddings": torch.randn(b, 16, 8, 8),
            "input_points": 64 * torch.rand(b, 1, p, 2),
            "input_labels": torch.randint(0, 2, (b, 1, p)),
        }
        for b, p in ((2, 3), (3, 5))
    ]
    shapes = {"image_embeddings": ("B", 16, 8, 8), "input_points": ("B", 1, "P", 2), "input_labels": ("B", 1, "P")}
    return SamMasks(_sam()), examples, shapes, {"P": (2, 9)}


def donut_swin() -> Case:
    """The encoder of Donut, at one size."""
    config = transformers.DonutSwinConfig(
        image_size=[32, 64], patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    examples = [{"pixel_values": torch.randn(b, 3, 32, 64)} for b in (2, 3)]
    return transformers.DonutSwinModel(config), examples, {"pixel_values": ("B", 3, 32, 64)}, {}


def trocr() -> Case:
    """A ViT and a causal decoder that looks at it."""
    encoder = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    decoder = transformers.TrOCRConfig(
        vocab_size=60, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48,
        max_position_embeddings=30, use_cache=False, cross_attention_hidden_size=32,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    examples = [
        {"pixel_values": torch.randn(b, 3, 32, 32), "decoder_input_ids": torch.randint(2, 60, (b, s))}
        for b, s in ((2, 5), (3, 9))
    ]
    shapes = {"pixel_values": ("B", 3, 32, 32), "decoder_input_ids": ("B", "S")}
    return transformers.VisionEncoderDecoderModel(config), examples, shapes, {"S": (2, 20)}


def layoutlmv3() -> Case:
    """Texts with their boxes on the page, and the page."""
    config = transformers.LayoutLMv3Config(
        **SMALL, vocab_size=60, max_position_embeddings=40, max_2d_position_embeddings=64, coordinate_size=6,
        shape_size=4, input_size=32, patch_size=8, num_labels=5,
    )  # fmt: skip
    examples = []
    for b, s in ((2, 7), (3, 12)):
        corners = torch.randint(0, 30, (b, s, 2))
        examples.append(
            {
                "input_ids": torch.randint(2, 60, (b, s)),
                "bbox": torch.cat([corners, corners + torch.randint(1, 30, (b, s, 2))], 2),
                "attention_mask": torch.ones(b, s, dtype=torch.long),
                "pixel_values": torch.randn(b, 3, 32, 32),
            }
        )
        examples[-1]["attention_mask"][0, s - 2 :] = 0
    shapes = {
        "input_ids": ("B", "S"), "bbox": ("B", "S", 4), "attention_mask": ("B", "S"), "pixel_values": ("B", 3, 32, 32)
    }  # fmt: skip
    return transformers.LayoutLMv3ForTokenClassification(config), examples, shapes, {"S": (2, 30)}


def mobilevit() -> Case:
    """Maps cut into patches, whose pixels attend to those of the same place."""
    config = transformers.MobileViTConfig(
        image_size=64, hidden_sizes=[16, 24, 32], num_hidden_layers=1, neck_hidden_sizes=[8, 8, 12, 16, 16, 16, 32],
        num_attention_heads=4, num_labels=5, mlp_ratio=2.0,
    )  # fmt: skip
    return images(transformers.MobileViTForImageClassification(config), 64)


def lcnet() -> Case:
    """PP-LCNetV3, the backbone of PP-OCRv5, at free sizes."""
    blocks = [[3, 16, 32, 1, False], [3, 32, 64, 2, False], [3, 64, 96, 2, False], [3, 96, 128, 2, False]]
    config = transformers.PPLCNetV3Config(
        scale=0.25, stem_channels=8, conv_symmetric_num=1,
        block_configs=[*([block] for block in blocks), [[5, 128, 160, 2, True]]],
        out_features=["stage2", "stage3", "stage4", "stage5"], out_indices=[2, 3, 4, 5],
    )  # fmt: skip
    return free_images(transformers.PPLCNetV3Backbone(config), [(64, 96), (96, 64)], 32)


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        deit, beit, convnextv2, siglip, sam_images, sam_masks, donut_swin, trocr, layoutlmv3, mobilevit,
        lcnet,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mostly_exhaustive(CASES, (), ("beit", "siglip", "sam_images", "trocr", "mobilevit", "lcnet"))
)
def test_networks_of_images(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)
