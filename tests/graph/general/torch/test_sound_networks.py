"""Networks of sound, of speech and of series of numbers of the transformers library give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.networks.library_networks import SMALL, Case, check_case, sounds, texts
from tests.support.marks import mostly_exhaustive

_SOUND = {
    **SMALL, "conv_dim": [8] * 3, "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def data2vec() -> Case:
    """Five convolutions of positions, each with a norm."""
    config = transformers.Data2VecAudioConfig(**_SOUND | {"num_conv_pos_embeddings": 2}, vocab_size=20)
    return sounds(transformers.Data2VecAudioForCTC(config))


def wavlm() -> Case:
    """Biases of relative positions that a gate weighs."""
    config = transformers.WavLMConfig(**_SOUND, vocab_size=20, num_buckets=16, max_bucket_distance=40)
    return sounds(transformers.WavLMForCTC(config))


def sew() -> Case:
    """Attention over pairs of frames, which are taken apart again."""
    config = transformers.SEWConfig(**_SOUND, vocab_size=20, squeeze_factor=2)
    return sounds(transformers.SEWForCTC(config))


def spectrograms() -> Case:
    """Overlapping patches of a spectrogram."""
    config = transformers.ASTConfig(**SMALL, max_length=64, num_mel_bins=32, patch_size=8, num_labels=5)
    examples = [{"input_values": torch.randn(b, 64, 32)} for b in (2, 3)]
    return transformers.ASTForAudioClassification(config), examples, {"input_values": ("B", 64, 32)}, {}


def vits_text() -> Case:
    """The part of VITS that draws no random numbers: texts with attention to relative positions."""
    return texts(_VitsText())


class _VitsText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.VitsConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=48, flow_size=16
        )
        self.encoder = transformers.VitsModel(config).text_encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self.encoder(
            input_ids=input_ids, padding_mask=attention_mask.unsqueeze(-1).float(), attention_mask=attention_mask
        )
        return found.last_hidden_state, found.prior_means, found.prior_log_variances


class _VitsSpeech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.VitsConfig(
            hidden_size=16, num_hidden_layers=1, flow_size=16, upsample_initial_channel=16, upsample_rates=[4, 2],
            upsample_kernel_sizes=[8, 4], resblock_kernel_sizes=[3, 5], resblock_dilation_sizes=[[1, 3], [1, 3]],
            prior_encoder_num_wavenet_layers=2, prior_encoder_num_flows=2,
        )  # fmt: skip
        model = transformers.VitsModel(config)
        self.flow, self.decoder = model.flow, model.decoder

    def forward(self, latents: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.decoder(self.flow(latents, mask, reverse=True) * mask)
        return found


def vits_speech() -> Case:
    """The flow of VITS in reverse, and the decoder of waves."""
    examples = []
    for b, n in ((2, 24), (1, 37)):
        mask = torch.ones(b, 1, n)
        mask[0, 0, n - 4 :] = 0
        examples.append({"latents": torch.randn(b, 16, n), "mask": mask})
    return _VitsSpeech(), examples, {"latents": ("B", 16, "N"), "mask": ("B", 1, "N")}, {"N": (8, 200)}


class _SpeechT5Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.SpeechT5Config(
            vocab_size=60, hidden_size=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48,
            decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=48, max_text_positions=40,
            encoder_max_relative_position=6,
        )  # fmt: skip
        self.encoder = transformers.SpeechT5ForTextToSpeech(config).speecht5.encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.encoder(input_values=input_ids, attention_mask=attention_mask).last_hidden_state
        return found


def speecht5() -> Case:
    """The encoder of texts, with relative positions that are limited."""
    return texts(_SpeechT5Encoder())


def patchtst() -> Case:
    """Series that are scaled by their own mean and spread, and cut into patches."""
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=4, num_hidden_layers=1, d_model=16,
        num_attention_heads=4, ffn_dim=24, prediction_length=6, loss="mse",
    )  # fmt: skip
    examples = [{"past_values": torch.randn(b, 32, 3)} for b in (2, 3)]
    return transformers.PatchTSTForPrediction(config), examples, {"past_values": ("B", 32, 3)}, {}


class _Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.TimeSeriesTransformerConfig(
            prediction_length=6, context_length=16, lags_sequence=[1, 2, 3], num_time_features=2, d_model=16,
            encoder_layers=1, decoder_layers=1, use_cache=False,
        )  # fmt: skip
        self.model = transformers.TimeSeriesTransformerModel(config)

    def forward(
        self, past_values: Tensor, past_time_features: Tensor, past_observed_mask: Tensor, future_values: Tensor,
        future_time_features: Tensor,
    ) -> Tensor:  # fmt: skip
        found: Tensor = self.model(
            past_values=past_values, past_time_features=past_time_features, past_observed_mask=past_observed_mask,
            future_values=future_values, future_time_features=future_time_features,
        ).last_hidden_state  # fmt: skip
        return found


def time_series() -> Case:
    """Values of earlier times beside features of the time, an encoder and a causal decoder."""
    examples = [
        {
            "past_values": torch.randn(b, 19), "past_time_features": torch.randn(b, 19, 2),
            "past_observed_mask": torch.ones(b, 19), "future_values": torch.randn(b, 6),
            "future_time_features": torch.randn(b, 6, 2),
        }
        for b in (2, 3)
    ]  # fmt: skip
    shapes = {key: ("B", *value.shape[1:]) for key, value in examples[0].items()}
    return _Forecaster(), examples, shapes, {}


class _Codec(nn.Module):
    """A codec whose results are codes and waves; its codebooks, which begin as zeros, differ."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, buffer in model.named_buffers():
            if name.endswith((".embed", ".embed_sum")):
                buffer.normal_(generator=generator)
            elif name.endswith(".cluster_usage"):
                buffer.fill_(1.0)
        self.model = model

    def forward(self, input_values: Tensor) -> tuple[Tensor, Tensor]:
        found = self.model(input_values)
        return found.audio_codes, found.audio_values


def encodec() -> Case:
    """Convolutions whose strides and pads are tensors, an LSTM, codes of residuals, and waves of any length."""
    config = transformers.EncodecConfig(
        num_filters=4, hidden_size=8, num_lstm_layers=1, upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=8,
        target_bandwidths=[24.0],
    )  # fmt: skip
    examples = [{"input_values": torch.randn(b, 1, n)} for b, n in ((2, 320), (3, 448))]
    shapes = {"input_values": ("B", 1, "N")}
    return _Codec(transformers.EncodecModel(config)), examples, shapes, {"N": (128, 640, 8)}


def mimi() -> Case:
    """Causal convolutions, attention that sees a window, and codes of two kinds, of waves of one length."""
    config = transformers.MimiConfig(
        num_filters=4, hidden_size=16, upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=8,
        vector_quantization_hidden_dimension=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=8, intermediate_size=24, num_quantizers=3, num_semantic_quantizers=1, upsample_groups=16,
        sampling_rate=1600, frame_rate=100.0, use_cache=False,
    )  # fmt: skip
    examples = [{"input_values": torch.randn(b, 1, 320)} for b in (2, 3)]
    return _Codec(transformers.MimiModel(config)), examples, {"input_values": ("B", 1, 320)}, {}


def dac() -> Case:
    """Snake activations, transposed convolutions, and codes found by normalised distances, of waves of one length."""
    config = transformers.DacConfig(
        encoder_hidden_size=4, downsampling_ratios=[2, 4], decoder_hidden_size=16, n_codebooks=2, codebook_size=16,
        codebook_dim=4,
    )  # fmt: skip
    examples = [{"input_values": torch.randn(b, 1, 320)} for b in (2, 3)]
    return _Codec(transformers.DacModel(config)), examples, {"input_values": ("B", 1, 320)}, {}


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        data2vec, wavlm, sew, spectrograms, vits_text, vits_speech, speecht5,
        patchtst, time_series, encodec, mimi, dac,
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mostly_exhaustive(CASES, (), ("sew", "spectrograms", "vits_text", "speecht5", "encodec"))
)
def test_networks_of_sound(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path)
