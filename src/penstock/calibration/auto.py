"""Try the methods of quantization and keep the one whose result diverges least from the original on held-out texts."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.calibration.divergence import MeanDivergence
from penstock.calibration.judge import Judge, check_texts, file_stamp
from penstock.calibration.outputs import check_outputs
from penstock.calibration.quantize import METHODS, DataOptions, check_amount, quantize_with_data
from penstock.calibration.unfinished import Workspace
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import check_float_weights, plan_weights, quantize_checkpoint
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.models.mapped import open_mapped
from penstock.quant.folder import check_new_folder
from penstock.quant.scheme import ROTATED_SUFFIX, SCHEMES, Scheme, quantizing_scheme
from penstock.runtime.build import Progress, ProgressCallback

__all__ = ["AutoReport", "Candidate", "check_auto", "methods_for", "quantize_auto"]

_NEAREST: Final = "rtn"
_ROTATED: Final = "hadamard"


@dataclass(frozen=True)
class Candidate:
    """A method and the divergence of its result; None and the reason if it could not be tried."""

    method: str
    divergence: MeanDivergence | None
    reason: str = ""


@dataclass(frozen=True)
class AutoReport:
    """The methods that were tried, the chosen one, its size in bytes and recipe, and the time in seconds."""

    candidates: tuple[Candidate, ...]
    method: str
    num_bytes: int
    judged_tokens: int
    recipe: Mapping[str, Any]
    seconds: float


def methods_for(scheme: Scheme) -> tuple[str, ...]:
    """Return the methods that are tried for a scheme.

    Importance matrices choose the lines of 4 bits only.  Smoothing is a cure for inputs of 8 bits, scales that are
    searched (awq) for weights of 4 bits.  A scheme that also exists with a rotation is tried with it, as ``hadamard``.
    """

    def is_sensible(method: str) -> bool:
        steps = method.split("+")
        is_fitting = "smooth" not in steps or scheme.activation_bits == 8
        return is_fitting and (scheme.weight_bits == 4 or not {"imatrix", "awq"} & set(steps))

    methods = (_NEAREST, *(method for method in METHODS if is_sensible(method)))
    if f"{scheme.name}{ROTATED_SUFFIX}" not in SCHEMES:
        return methods
    return (*methods, _ROTATED, f"{_ROTATED}+gptq")


def quantize_auto(
    source: Path | str, out: Path | str, scheme: str, options: DataOptions, progress: ProgressCallback | None = None
) -> AutoReport:
    """Write the folder ``out`` by the method with the least divergence.

    ``options``: the texts, of which a quarter is held out to judge the methods, and the threads; its method is ignored.
    A killed run continues with the methods that were not tried.  Raises what ``quantize_with_data`` raises, but a
    method that has too few tokens is left out.
    """
    start, final, source = time.monotonic(), Path(out), Path(source)
    row = quantizing_scheme(scheme)
    check_new_folder(final)
    checkpoint = open_mapped(source)
    check_auto(checkpoint, final, scheme, options)  # before the measurements for another file are removed
    inputs = {**asdict(options), "scheme": scheme, "calibration": file_stamp(options.calibration), "threads": None}
    inputs |= {"imatrix_out": None}
    work = Workspace(final, inputs | {"method": "auto"}, checkpoint)
    judge = Judge(source, work, options.threads, progress)
    judge.prepare(options.calibration, options.num_tokens)
    methods = methods_for(row)
    known: dict[str, Any] = work.read("candidates.json") or {}
    for done, method in enumerate(methods):
        if progress is not None:
            progress(Progress("methods", done, len(methods), "methods", method))
        if method not in known:
            known[method] = asdict(_Trial(source, checkpoint, scheme, options, work, progress).run(method, judge))
            work.write("candidates.json", known)
    candidates = tuple(_candidate(known[name]) for name in methods)
    best = min(candidates, key=lambda own: own.divergence.mean if own.divergence is not None else math.inf)
    recipe = _finish(work.folder / best.method, final, best, candidates, judge)
    num_bytes = (final / "model.safetensors").stat().st_size
    work.remove()
    tokens = judge.held.num_tokens
    return AutoReport(candidates, best.method, num_bytes, tokens, recipe, time.monotonic() - start)


def check_auto(checkpoint: Checkpoint, final: Path, scheme: str, options: DataOptions) -> None:
    """Check all options and the files that they name; errors of ``quantize_auto``."""
    check_float_weights(checkpoint)
    if options.calibration is not None:
        check_texts(options.calibration)
    check_outputs(final, None)
    plan = plan_weights(checkpoint, quantizing_scheme(scheme), options.blacklist, options.head, options.embedding)
    check_amount(checkpoint, plan, (), options.calibration, options.num_tokens)  # without GPTQ if it needs more


def _candidate(values: Mapping[str, Any]) -> Candidate:
    divergence = values["divergence"]
    return Candidate(values["method"], None if divergence is None else MeanDivergence(**divergence), values["reason"])


@dataclass(frozen=True)
class _Trial:
    """The model, data and options that a method is tried with."""

    source: Path
    checkpoint: Checkpoint
    scheme: str
    options: DataOptions
    work: Workspace
    progress: ProgressCallback | None

    def run(self, method: str, judge: Judge) -> Candidate:
        """Quantize by a method to a folder of its name, and judge it; one that needs more tokens is left out."""
        out = self.work.folder / method
        shutil.rmtree(out, ignore_errors=True)
        steps, scheme = method.split("+"), self.scheme
        if steps[0] == _ROTATED:
            steps, scheme = steps[1:] or [_NEAREST], f"{scheme}{ROTATED_SUFFIX}"
        try:
            if steps == [_NEAREST]:
                quantize_checkpoint(
                    self.checkpoint, out, scheme, head=self.options.head, embedding=self.options.embedding
                )
            else:
                own = replace(self.options, method="+".join(steps), calibration=None, data=judge.seen, imatrix_out=None)
                quantize_with_data(self.source, out, scheme, own, self.progress)
        except InvalidArgumentError as error:
            if error.code != "too_few_tokens":
                raise
            return Candidate(method, None, str(error))
        try:
            return Candidate(method, judge.divergence(out))
        except InvalidFileError as error:
            if error.code != "non_finite_logits" or method == _NEAREST:
                raise
            return Candidate(method, None, str(error))


def _finish(
    chosen: Path, final: Path, best: Candidate, candidates: tuple[Candidate, ...], judge: Judge
) -> Mapping[str, Any]:
    """Write the figures into config.json of the chosen folder, and give it its name."""
    config = json.loads((chosen / "config.json").read_text())
    section = config["quantization_config"]
    tried = {own.method: round(own.divergence.mean, 8) for own in candidates if own.divergence is not None}
    section["recipe"] = {
        **section.get("recipe", {"method": best.method}),
        "divergence": tried[best.method],
        "judged_tokens": judge.held.num_tokens,
        "judged_sha256": judge.held.digest,
        "tried": tried,
    }
    (chosen / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    try:
        check_new_folder(final)
        os.rename(chosen, final)
    except OSError as error:
        raise FileAccessError(f"{final}: {error.strerror}") from None
    recipe: Mapping[str, Any] = section["recipe"]
    return recipe
