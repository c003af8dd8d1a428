"""Checks tasks and ``generate`` on real, published models against transformers, and prints a table.

    python -m benchmarks.real.tasks FOLDER [--threads 2]

FOLDER keeps the models (``models.py``).  The rows of all-MiniLM-L6-v2 are compared with the pipeline
feature-extraction.  Qwen2.5-0.5B-Instruct is read from its GGUF file by both, in float32: ids of greedy answers, with
rules for repetitions, words and ends, and of beam search; the scores of each step, or of each answer of a search; and
the scores that the rules of draws leave.
It takes some minutes and 5 GB of memory.  The exit status is 1 if ids differ, or rows or scores are further away than
they may be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real.models import MODELS, assemble
from benchmarks.real.texts import PROMPTS, SENTENCES

NEW_TOKENS = 12
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.05, "top_k": 0},
    "typical_p": {"typical_p": 0.6, "top_k": 0},
    "top_k and top_p": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
    "top_k and min_p": {"temperature": 1.4, "top_k": 12, "min_p": 0.01},
}
"""Rules of draws: the scores of the first token after them are compared, not what is drawn."""
WARPERS: dict[str, float] = {"EpsilonLogitsWarper": 3e-3, "EtaLogitsWarper": 5e-3, "MinPLogitsWarper": 0.05}
WARPERS |= {"TypicalLogitsWarper": 0.6, "TopPLogitsWarper": 0.8, "TemperatureLogitsWarper": 0.7}
"""Rules of transformers, which both get as a logits processor, with their first argument."""
MOST_DIFFERENCE = 1e-5
MOST_SCORE_DIFFERENCE = 2e-3
"""Of a score of a token, whose size is some tens."""
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "bad_words_ids": {"bad_words_ids": [[11], [13], [374, 264]]},
    "forced_eos_token_id": {"forced_eos_token_id": 151645},
    "num_beams": {"num_beams": 3},
    "num_beams, all returned": {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5},
    "num_beams, no_repeat_ngram_size": {"num_beams": 2, "no_repeat_ngram_size": 2, "early_stopping": True},
}


def check_features(folder: Path, threads: int) -> bool:
    """Compare the rows of a sentence encoder with those of transformers' pipeline."""
    import transformers

    import penstock

    theirs = transformers.pipeline("feature-extraction", model=str(folder))
    furthest = 0.0
    with penstock.pipeline("feature-extraction", folder, threads=threads) as own:
        for text in SENTENCES:
            expected = np.array(theirs(text, truncation=True), np.float32)
            found = np.array(own(text, truncation=True), np.float32)
            furthest = max(furthest, float(np.abs(found - expected).max()))
    print(f"feature-extraction: {len(SENTENCES)} texts, at most {furthest:.1e} from transformers\n", flush=True)
    return furthest < MOST_DIFFERENCE


def check_draws(own: Any, theirs: Any, prompts: Sequence[list[int]]) -> bool:
    """Compare the scores of the first token after the rules of SAMPLED, and a forced first token."""
    import torch
    import transformers

    cases = dict(SAMPLED)
    for name, value in WARPERS.items():
        cases[name] = {"logits_processor": [getattr(transformers, name)(value)], "top_k": 0}
    equal_cuts = True
    furthest = 0.0
    for name, case in cases.items():
        largest, num_kept = 0.0, []
        for ids in prompts:
            how = {
                "max_new_tokens": 1,
                "do_sample": True,
                "output_scores": True,
                "return_dict_in_generate": True,
                **case,
            }
            with torch.no_grad():
                expected = theirs.generate(torch.tensor([ids]), **how).scores[0][0].numpy()
            row = own.generate([ids], **how).scores[0][0]
            finite = np.isfinite(expected)
            is_equal = bool((np.isfinite(row) == finite).all())
            equal_cuts &= is_equal
            num_kept.append(f"{finite.sum()}" if is_equal else f"{np.isfinite(row).sum()} instead of {finite.sum()}")
            both = finite & np.isfinite(row)
            largest = max(largest, float(np.abs(row[both] - expected[both]).max()))
        print(f"| draws: {name} | keep {', '.join(num_kept)} tokens | {largest:.1e} |", flush=True)
        furthest = max(furthest, largest)
    forced = {"max_new_tokens": 3, "do_sample": False, "forced_bos_token_id": 9707}
    with torch.no_grad():
        expected_ids = theirs.generate(torch.tensor([prompts[0][:1]]), **forced).tolist()
    is_forced = own.generate([prompts[0][:1]], **forced) == expected_ids
    print(f"| forced_bos_token_id | {int(is_forced)} of 1 | |", flush=True)
    return equal_cuts and is_forced and furthest < MOST_SCORE_DIFFERENCE


def check_generate(file: Path, threads: int) -> bool:
    """Compare the calls of CASES on the first prompts with those of transformers, which reads the same file."""
    import torch
    import transformers

    import penstock

    theirs = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    theirs.generation_config = transformers.GenerationConfig(pad_token_id=151643)
    is_right = True
    print("| call | equal answers | largest difference of a score |\n|---|---|---|")
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with penstock.AutoModel.from_pretrained(file, scheme="f32", kv_cache="f32", max_requests=8, threads=threads) as own:
        tokenizer = penstock.AutoTokenizer.from_pretrained(file)
        prompts = [tokenizer(text)["input_ids"] for text in list(PROMPTS.values())[:2]]
        for name, case in CASES.items():
            equal, furthest = 0, 0.0
            for ids in prompts:
                with torch.no_grad():
                    answer = theirs.generate(
                        torch.tensor([ids]), return_dict_in_generate=True, output_scores=True, **options, **case
                    )
                found = own.generate([ids], output_scores=True, return_dict_in_generate=True, **options, **case)
                equal += found.sequences == answer.sequences.tolist()
                if "num_beams" in case:
                    differences = np.array(found.sequences_scores) - answer.sequences_scores.numpy()
                    furthest = max(furthest, float(np.abs(differences).max()))
                    continue
                rows = torch.cat(answer.scores).numpy()
                finite = np.isfinite(rows)
                if found.scores[0].shape == rows.shape:
                    furthest = max(furthest, float(np.abs(found.scores[0][finite] - rows[finite]).max()))
            is_right &= equal == len(prompts) and furthest < MOST_SCORE_DIFFERENCE
            print(f"| {name} | {equal} of {len(prompts)} | {furthest:.1e} |", flush=True)
        is_right &= check_draws(own, theirs, prompts)
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    files = {model.name: assemble(model, args.folder) for model in MODELS[:2]}
    results = [
        check_features(files["all-MiniLM-L6-v2"], args.threads),
        check_generate(files["Qwen2.5-0.5B-Instruct"], args.threads),
    ]
    print("all as expected" if all(results) else "not as expected")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
