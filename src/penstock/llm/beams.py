"""Beam searches as a front end begins them: what they cannot have, and the options of the engine's search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.engine.decoding.beam_search import BeamOptions, BeamSearch
from penstock.engine.decoding.hook import Callables
from penstock.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.options import BeamSettings
    from penstock.engine.params import ResolvedSampling, SamplingParams

__all__ = ["check_beams", "new_search"]


def check_beams(params: SamplingParams, num_beams: int) -> None:
    """Refuse the sampling parameters that a beam search cannot have.  UnsupportedError, InvalidArgumentError."""
    if params.stop:
        raise UnsupportedError(
            "stop_strings: expected none with num_beams; a stopping criterion can look at the tokens",
            param="stop_strings",
        )
    for name in ("thinking_token_budget", "logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise UnsupportedError(f"{name}: expected None with num_beams {num_beams}", param=name)
    if params.n > num_beams:
        raise InvalidArgumentError(
            f"num_return_sequences: expected at most num_beams ({num_beams}), got {params.n}",
            param="num_return_sequences",
        )


def new_search(
    engine: Engine,
    sampling: ResolvedSampling,
    num_results: int,
    beams: BeamSettings,
    callables: Callables | None = None,
    *,
    keeps_rows: bool = False,
) -> BeamSearch:
    """Return the search of a prompt, whose ``samplings`` are those of its requests; see ``BeamOptions``.

    Raises UnsupportedError for a temperature or a grammar, and InvalidArgumentError for more beams than the queue and a
    step have places.
    """
    num_beams = beams.num_beams
    if sampling.temperature > 0:
        raise UnsupportedError(
            f"do_sample: expected False with num_beams {num_beams}, got True; or num_beams=1", param="do_sample"
        )
    if sampling.grammar is not None:
        raise UnsupportedError(f"num_beams: expected 1 with a grammar, got {num_beams}", param="num_beams")
    most = engine.options.max_waiting + engine.scheduler.max_requests
    if engine.options.max_waiting and num_beams > most:
        raise InvalidArgumentError(
            f"num_beams: expected at most max_requests and max_waiting ({most}), got {num_beams}", param="num_beams"
        )
    options = BeamOptions(
        num_beams, num_results, beams.length_penalty, beams.early_stopping, frozenset(sampling.end_ids), keeps_rows
    )
    return BeamSearch(engine, sampling, options, callables or Callables())
