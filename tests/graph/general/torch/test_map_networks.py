"""Networks of the transformers library that find boxes and depths give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

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


CASES: dict[str, Callable[[], Case]] = {function.__name__: function for function in (yolos, dpt, depth_anything)}


@pytest.mark.parametrize("name", mostly_exhaustive(CASES, (), ("yolos", "depth_anything")))
def test_networks_of_maps(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)
