"""Answers of blocks that were computed before, in files of a folder."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from penstock.errors import FileAccessError, InvalidFileError

__all__ = ["BlockCheckpoints"]


class BlockCheckpoints:
    """The answered blocks in ``folder``, which is made if it is not there; several processes may use it at once.

    A block is known by its prompts and by ``facts``, text that says what else its answers depend on.  Raises
    FileAccessError if the folder cannot be used, here and in each call.
    """

    def __init__(self, folder: Path, facts: str) -> None:
        self._folder, self._facts = folder, facts
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refusal(error) from error

    def read(self, prompts: Sequence[str]) -> list[str] | None:
        """Return the answers to the prompts of a block, None if it has not been answered; InvalidFileError."""
        path = self._path(prompts)
        try:
            answers = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(error) from error
        except ValueError as error:
            raise InvalidFileError(f"{path}: expected JSON: {error}") from error
        if not isinstance(answers, list) or [type(answer) for answer in answers] != [str] * len(prompts):
            raise InvalidFileError(f"{path}: expected a list of {len(prompts)} strings")
        return answers

    def write(self, prompts: Sequence[str], answers: Sequence[str]) -> None:
        """Keep the answers of a block.  The file appears when it is complete."""
        path = self._path(prompts)
        part = path.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            part.write_text(json.dumps([*answers]), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            raise self._refusal(error) from error

    def _path(self, prompts: Sequence[str]) -> Path:
        key = sha256(json.dumps([self._facts, [*prompts]]).encode()).hexdigest()
        return self._folder / f"{key}.json"

    def _refusal(self, error: OSError) -> FileAccessError:
        return FileAccessError(
            f"checkpoint: {error.filename or self._folder}: {error.strerror or error}", param="checkpoint"
        )
