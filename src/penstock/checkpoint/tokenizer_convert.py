"""Convert a SentencePiece model to ``tokenizer.json`` with transformers: extra penstock[sentencepiece].

The tokenizers that ``checkpoint/sentencepiece`` knows do not need it.  The conversion runs in a separate process, so
that the serving process never loads transformers.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

from penstock.checkpoint.tokenizer_files.names import SENTENCEPIECE_FILES
from penstock.errors import InvalidFileError, UnsupportedError
from penstock.extras import install_command

__all__ = ["convert_tokenizer"]

MAX_SECONDS: Final = 300
_SCRIPT: Final = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
sys.stdout.buffer.write(tokenizer.backend_tokenizer.to_str().encode())
"""


def convert_tokenizer(folder: Path) -> bytes:
    """Return the bytes of a ``tokenizer.json`` that is equivalent to the folder's SentencePiece model.

    Raises UnsupportedError without the extra, InvalidFileError when transformers cannot read the file.
    """
    file = next((name for name in SENTENCEPIECE_FILES if (folder / name).exists()), SENTENCEPIECE_FILES[0])
    missing = [name for name in ("transformers", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"{folder}: expected tokenizer.json, got {file}, whose conversion requires "
            f"{' and '.join(missing)}. Run `{install_command('sentencepiece')}`, or save tokenizer.json with "
            "transformers' save_pretrained."
        )
    try:
        result = subprocess.run(
            [sys.executable, "-P", "-c", _SCRIPT, str(folder.resolve())],
            capture_output=True,
            check=False,
            timeout=MAX_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise InvalidFileError(f"{folder}: {file}: the conversion took more than {MAX_SECONDS} s") from None
    if result.returncode or not result.stdout.startswith(b"{"):
        lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise InvalidFileError(f"{folder}: {file}: transformers could not convert it: {ascii(lines[-1])[1:-1]}")
    return result.stdout
