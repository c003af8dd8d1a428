"""Networks of the transformers library with random weights give what PyTorch gives, at other sizes than captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.graph.general.lower import write_network
from penstock.graph.general.torch.capture import capture_module
from penstock.networks.predictor import open_predictor

Case = tuple[nn.Module, Sequence[Mapping[str, Tensor]], Mapping[str, Sequence[Any]], Mapping[str, Any]]

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def randomised(module: nn.Module) -> nn.Module:
    """Give norms, biases and heads, which begin as ones and zeros, values that differ from each other."""
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.normal_(0, 0.1, generator=generator)
            part.running_var.uniform_(0.5, 1.5, generator=generator)
    with torch.no_grad():
        for parameter in module.parameters():
            if (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.empty_like(parameter).uniform_(-0.2, 0.2, generator=generator))
    return module.eval()


def images(module: nn.Module, sizes: Sequence[tuple[int, int]], multiple: int) -> Case:
    examples = [{"pixel_values": torch.randn(b + 1, 3, *size)} for b, size in enumerate(sizes)]
    limits = (min(min(size) for size in sizes), 256, multiple)
    return module, examples, {"pixel_values": ("B", 3, "H", "W")}, {"H": limits, "W": limits}


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
    return transformers.SwinForImageClassification(config), [], {"pixel_values": ("B", 3, 32, 32)}, {}


def dinov2() -> Case:
    """Position embeddings that are resized to the image, bicubic."""
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=56, patch_size=14
    )
    return images(transformers.Dinov2Model(config), [(56, 84), (42, 70)], 14)


def segformer() -> Case:
    """Attention over shrunk maps, and maps of four sizes that are resized and joined."""
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 16, 16], num_attention_heads=[1, 2, 2, 2], decoder_hidden_size=16,
        num_labels=4,
    )  # fmt: skip
    return images(transformers.SegformerForSemanticSegmentation(config), [(64, 96), (96, 64)], 32)


def wav2vec2() -> Case:
    """Convolutions of sound, a weight that is normalised, a norm of groups."""
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=[8] * 3, conv_kernel=[10, 3, 2], conv_stride=[5, 2, 2], num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, vocab_size=20,
    )  # fmt: skip
    examples = [{"input_values": torch.randn(b, n)} for b, n in ((2, 600), (1, 935))]
    return transformers.Wav2Vec2ForCTC(config), examples, {"input_values": ("B", "N")}, {"N": (400, 4000)}


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


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function for function in (roberta, swin, dinov2, segformer, wav2vec2, whisper)
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_networks_of_the_library(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        module, examples, shapes, sizes = CASES[name]()
        examples = examples or [{"pixel_values": torch.randn(b, 3, 32, 32)} for b in (2, 3)]
        randomised(module)
        write_network(capture_module(module, examples[0], shapes=shapes, sizes=sizes), tmp_path / "net.psm")
        with open_predictor(tmp_path / "net.psm") as predictor:
            for example in examples:
                expected = [t for t in pytree.tree_leaves(module(**example)) if isinstance(t, Tensor)]
                found = predictor.run({key: value.numpy() for key, value in example.items()})
                for ours, theirs in zip(found, expected, strict=True):
                    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
