"""PP-OCR's detector of the transformers library gives the same from PyTorch and from the ONNX file of the module."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from tests.networks.library_networks import randomised

STAGES = {"out_features": ["stage2", "stage3", "stage4", "stage5"], "out_indices": [2, 3, 4, 5]}


class FirstOutput(nn.Module):
    """A network of the library with a tensor as its result."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the map of texts."""
        output: Tensor = self.network(pixel_values=pixel_values)[0]
        return output


def lcnet() -> Any:
    """Return a small PP-LCNetV3: depthwise convolutions with hard swish, some with squeeze-and-excitation."""
    blocks = [[3, 16, 32, 1, False], [3, 32, 64, 2, False], [3, 64, 96, 2, False], [3, 96, 128, 2, False]]
    return transformers.PPLCNetV3Config(
        scale=0.25,
        stem_channels=8,
        conv_symmetric_num=1,
        block_configs=[*([block] for block in blocks), [[5, 128, 160, 2, True]]],
        **STAGES,
    )


def detector() -> nn.Module:
    """The detector of text: a pyramid of maps, and transposed convolutions."""
    config = transformers.PPOCRV5MobileDetConfig(
        backbone_config=lcnet(), neck_out_channels=24, layer_list_out_channels=[16, 24, 32, 40]
    )
    return FirstOutput(transformers.PPOCRV5MobileDetForObjectDetection(config))


@pytest.mark.long
def test_ocr_from_pytorch_and_from_onnx(tmp_path: Path) -> None:
    shapes = ((2, 3, 64, 96), (3, 3, 64, 96))
    torch.manual_seed(0)
    module = randomised(detector())
    example = torch.randn(*shapes[0])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        captured = penstock.capture(module, example, shapes={"pixel_values": ("B", *shapes[0][1:])})
        torch.onnx.export(
            module, (example,), str(tmp_path / "net.onnx"), dynamo=False, input_names=["pixel_values"],
            opset_version=17, dynamic_axes={"pixel_values": {0: "B"}},
        )  # fmt: skip
        read = penstock.read_network(tmp_path / "net.onnx")
        for network, path in ((captured, "captured.psm"), (read, "read.psm")):
            network.save(tmp_path / path)
        for shape in shapes:
            image = torch.randn(*shape)
            expected = module(image).numpy()
            found = []
            for path in ("captured.psm", "read.psm"):
                with penstock.open_predictor(tmp_path / path) as predictor:
                    found += predictor.run([image.numpy()])
            limit = 1e-4 * float(np.abs(expected).max())
            np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=limit)
            np.testing.assert_allclose(found[1], expected, rtol=1e-4, atol=limit)
            np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=limit)
