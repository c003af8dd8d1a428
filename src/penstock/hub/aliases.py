"""Short names for well-known public models of the families that Penstock runs.

Sizes come from the ``config.json`` and the safetensors of each repository.  They are there for the table of
``penstock list --available``; a download reads the hub's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.hub.memory_need import ModelShape

__all__ = ["ALIASES", "Alias"]


@dataclass(frozen=True)
class Alias:
    """A short name: what it stands for, the bytes to download, and the sizes that decide the memory."""

    repository: str
    family: str
    download_bytes: int
    shape: ModelShape


def _row(repository: str, family: str, megabytes: int, parameters: int, sizes: str, *, tied: bool = True) -> Alias:
    """Return a row: size in MB, parameters in millions, and sizes as "layers hidden inner kv_heads head_dim vocabulary
    context"."""
    layers, hidden, inner, heads, head_dim, vocab, context = (int(size) for size in sizes.split())
    shape = ModelShape(
        num_parameters=parameters * 10**6,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=vocab,
        context_len=context,
        tied=tied,
        dtype="bf16",
    )
    return Alias(repository, family, megabytes * 10**6, shape)


# fmt: off
ALIASES: Final[dict[str, Alias]] = {
    # name             repository, family, MB to download, million parameters,
    #                  layers, hidden, inner, KV heads, head size, vocabulary, context
    "smollm2-135m": _row("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 272, 135, "30 576 1536 3 64 49152 8192"),
    "smollm2-360m": _row("HuggingFaceTB/SmolLM2-360M-Instruct", "llama", 727, 362, "32 960 2560 5 64 49152 8192"),
    "smollm2-1.7b": _row("HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 3426, 1711, "24 2048 8192 32 64 49152 8192"),
    "tinyllama-1.1b": _row("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "llama", 2202, 1100, "22 2048 5632 4 64 32000 2048",
                           tied=False),
    "llama3.2-1b": _row("meta-llama/Llama-3.2-1B-Instruct", "llama", 2481, 1236, "16 2048 8192 8 64 128256 131072"),
    "llama3.2-3b": _row("meta-llama/Llama-3.2-3B-Instruct", "llama", 6435, 3213, "28 3072 8192 8 128 128256 131072"),
    "llama3.1-8b": _row("meta-llama/Llama-3.1-8B-Instruct", "llama", 16070, 8030, "32 4096 14336 8 128 128256 131072",
                        tied=False),
    "mistral-7b": _row("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 14498, 7248, "32 4096 14336 8 128 32768 32768",
                       tied=False),
    "qwen2.5-0.5b": _row("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 999, 494, "24 896 4864 2 64 151936 32768"),
    "qwen2.5-1.5b": _row("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 3099, 1544, "28 1536 8960 2 128 151936 32768"),
    "qwen2.5-7b": _row("Qwen/Qwen2.5-7B-Instruct", "qwen2", 15243, 7616, "28 3584 18944 4 128 152064 32768",
                       tied=False),
    "qwen3-0.6b": _row("Qwen/Qwen3-0.6B", "qwen3", 1519, 596, "28 1024 3072 8 128 151936 40960"),
    "qwen3-1.7b": _row("Qwen/Qwen3-1.7B", "qwen3", 4079, 1721, "28 2048 6144 8 128 151936 40960"),
    "qwen3-4b": _row("Qwen/Qwen3-4B", "qwen3", 8060, 4022, "36 2560 9728 8 128 151936 40960"),
}
# fmt: on
