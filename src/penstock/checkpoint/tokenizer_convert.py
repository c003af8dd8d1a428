"""``tokenizer.model`` (SentencePiece) to ``tokenizer.json``, through transformers: the extra penstock[sentencepiece].

It runs in a process of its own, so that transformers never enters the one that serves.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["convert_tokenizer"]

MAX_SECONDS: Final = 300
_SCRIPT: Final = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
sys.stdout.buffer.write(tokenizer.backend_tokenizer.to_str().encode())
"""


def convert_tokenizer(folder: Path) -> bytes:
    """The bytes of a ``tokenizer.json`` that says what the folder's ``tokenizer.model`` says.

    Raises UnsupportedError without the extra, InvalidFileError when transformers cannot read the file.
    """
    missing = [name for name in ("transformers", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{folder}: has tokenizer.model but no tokenizer.json, and converting it needs {' and '.join(missing)}: "
            "pip install 'penstock[sentencepiece]', or save tokenizer.json with transformers' save_pretrained"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _SCRIPT, str(folder.resolve())],
            capture_output=True,
            check=False,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InvalidFileError(f"{folder}: tokenizer.model: converting it took more than {MAX_SECONDS} s") from None
    if done.returncode or not done.stdout.startswith(b"{"):
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise InvalidFileError(
            f"{folder}: tokenizer.model: transformers could not convert it: {ascii(lines[-1])[1:-1]}"
        )
    return done.stdout
