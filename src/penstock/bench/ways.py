"""The ways to run a model: when to choose each, what it is expected to take, and the commands to type."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.advise import PYTHON_BYTES, Advice, SchemeRow
from penstock.bench.step_probe import seconds_of

__all__ = ["Way", "bundle_commands", "ways"]

_PROMPT = '"Once upon a time"'


@dataclass(frozen=True)
class Way:
    """A way to run a model: its times in seconds, None where nothing was measured, and its memory in bytes.

    ``token_s`` is the time per token with all requests running in Python and the service, else of one request.
    """

    name: str
    choose: str
    first_token_s: float | None
    token_s: float | None
    memory_bytes: int
    note: str
    commands: list[str]


def bundle_commands(advice: Advice, model: str, scheme: str) -> tuple[str, list[str]]:
    """Return the bundle of a model in a scheme, and the commands that make it: none if ``model`` is that bundle."""
    path = Path(model)
    if advice.only_scheme == scheme and path.is_file():
        return shlex.quote(model), []
    stem = path.resolve().name.removesuffix(".psm").removesuffix(f"-{advice.only_scheme}")
    bundle = shlex.quote(f"{stem}-{scheme}.psm")
    needs_original = advice.only_scheme not in (None, scheme)
    source = "CHECKPOINT" if needs_original else shlex.quote(model)
    network = f" --network {shlex.quote(advice.script)}" if advice.script else ""
    return bundle, [f"penstock export {source} {bundle} --scheme {scheme}{network}"]


def _double_quoted(code: str) -> str:
    """Quote code for the shell; in double quotes, which are easier to read around a Python string, if that is safe."""
    return shlex.quote(code) if set(code) & set('"$`\\!') else f'"{code}"'


def ways(advice: Advice, model: str, row: SchemeRow) -> list[Way]:
    """Return the ways to run a model in the scheme of a row."""
    bundle, make = bundle_commands(advice, model, row.scheme)
    work = advice.work
    context_len = work.prompt_tokens + work.new_tokens
    kv = "" if advice.kv_cache == "auto" else f" --kv-cache {advice.kv_cache}"
    first, alone, together = row.first_token, row.token_alone, row.token
    first_s, alone_s = seconds_of(first), seconds_of(alone)
    needs_original = advice.only_scheme not in (None, row.scheme)
    source, scheme = ("CHECKPOINT" if needs_original else model), f", scheme={row.scheme!r}"
    opened = f"LLM({source!r}{'' if Path(source).is_file() else scheme})"
    code = f"from penstock import LLM; print({opened}.generate('Once upon a time').text)"
    return [
        Way(
            "Python", "offline: your own program has all prompts, or you develop the network",
            first_s, seconds_of(together), row.memory_bytes, "A checkpoint folder is captured and packed once.",
            [f"python -c {_double_quoted(code)}", *make, f"penstock batch {bundle} requests.jsonl answers.jsonl"],
        ),
        Way(
            "bundle", "one file: the machine that runs it has no PyTorch and no checkpoint",
            first_s, alone_s, row.device_bytes + PYTHON_BYTES, "It opens in milliseconds; processes share its weights.",
            [*make, f"penstock run {bundle} {_PROMPT} --context-len {context_len}{kv}"],
        ),
        Way(
            "service", "online: requests arrive over time, from other programs or people",
            first_s, seconds_of(together), row.memory_bytes,
            "HTTP adds about 2 ms to the first text and takes up to 11 % of the tokens/s "
            "(docs/history/performance.md).",
            [*make, f"penstock serve {bundle} --max-requests {work.concurrency} --context-len {context_len}{kv}"],
        ),
        Way(
            "device", "a program in C or C++, or a machine without Python: one request at a time",
            first.native_s if first else None, alone.native_s if alone else None, row.device_bytes,
            "It needs libc and the file. These are the times of this machine, without Python.",
            [*make, f"penstock-lite {bundle} {_PROMPT} --max-tokens {work.new_tokens}{kv}"],
        ),
    ]  # fmt: skip
