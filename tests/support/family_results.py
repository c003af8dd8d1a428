"""Measure every family against its reference, for the table of the documents: docs/generate/families.json.

python -m tests.support.family_results
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers

from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits
from tests.models.steps import relative_error, run_whole
from tests.support.families import FAMILIES, expected_logits, prompt, save
from tests.support.own_references import OWN_REFERENCES

FILE = Path(__file__).parents[2] / "docs/generate/families.json"
LIMITS = ProgramLimits(max_tokens=128, max_requests=4, max_rows=128, num_pages=12, context_len=256)


def error_of(name: str) -> float:
    """The largest relative error of the logits of 70 tokens in float32, the larger of eager kernels and reference."""
    with TemporaryDirectory() as folder:
        program = EagerProgram(save(name, Path(folder) / name), threads=1, limits=LIMITS)
        try:
            return float(relative_error(run_whole(program, prompt(70)), expected_logits(name, prompt(70))))
        finally:
            program.close()


def main() -> None:
    """Write the file."""
    types: dict[str, dict[str, object]] = {}
    for name, (model_type, _) in FAMILIES.items():
        own = types.setdefault(model_type, {"reference": "transformers", "networks": 0, "error": 0.0})
        own["reference"] = "PyTorch" if model_type in OWN_REFERENCES else f"transformers {transformers.__version__}"
        own["networks"] = int(str(own["networks"])) + 1
        own["error"] = max(float(str(own["error"])), float(f"{error_of(name):.1e}"))
    FILE.write_text(json.dumps(dict(sorted(types.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
