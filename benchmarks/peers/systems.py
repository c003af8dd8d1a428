"""The systems to compare: a peer or Penstock, with weights of one precision."""

from __future__ import annotations

from dataclasses import dataclass

PENSTOCK = "penstock"
PRECISIONS = ("4 bit", "8 bit", "bf16")
SHAPES = ("348m", "1.1b")
MEASURES = ("decode:1", "decode:8", "decode:32", "prefill:512", "start")


@dataclass(frozen=True)
class System:
    """``mode`` is the peer's own name of the precision.

    ``embedding_bits`` are those of a stored embedding weight: the embedding is not read to make a token, so it does
    not count in "bits per weight".  ``together``: one process takes all measures, for a start takes about a minute.
    """

    peer: str
    mode: str
    precision: str
    embedding_bits: float = 16.0
    together: bool = False

    @property
    def name(self) -> str:
        return f"{self.peer} {self.mode}"


SYSTEMS = (
    System(PENSTOCK, "w4a8", "4 bit"),
    System("llama.cpp", "Q4_0", "4 bit", 4.5),
    System("llama.cpp", "Q4_K_M", "4 bit", 4.5),
    System("openvino", "int4", "4 bit", 8.0),
    System("onnxruntime", "int4", "4 bit", 32.0),
    System("vllm", "w4a16", "4 bit", together=True),
    System(PENSTOCK, "w8a8", "8 bit"),
    System("llama.cpp", "Q8_0", "8 bit", 8.5),
    System("openvino", "int8", "8 bit", 8.0),
    System("onnxruntime", "int8", "8 bit", 32.0),
    System("ctranslate2", "int8", "8 bit", 8.0),
    System("vllm", "w8a8", "8 bit", together=True),
    System(PENSTOCK, "bf16", "bf16"),
    System("llama.cpp", "bf16", "bf16"),
    System("openvino", "fp16", "bf16"),
    System("transformers", "bf16", "bf16"),
    System("vllm", "bf16", "bf16", together=True),
)


def find_system(name: str) -> System:
    for system in SYSTEMS:
        if system.name == name:
            return system
    raise SystemExit(f"system: expected one of {', '.join(s.name for s in SYSTEMS)}, got {name!r}")
