"""``make check-vocabs`` tells files whose ids are the expected ones from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gguf_files import gguf_bytes, text_metadata
from tests.support.gguf_vocabs import SEPARATOR, main

TEXTS = ("ab", "a ab", "é")  # a space is put before a text
IDS = ([264], [263, 264], [259, 198, 172])


@pytest.mark.parametrize(("wrong", "status"), [(False, 0), (True, 1)])
def test_ids_are_compared(wrong: bool, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ggml-vocab-tiny.gguf"
    path.write_bytes(gguf_bytes(text_metadata(), {}))
    lines = [" ".join(map(str, ids)) for ids in IDS]
    if wrong:
        lines[1] += " 5"
    Path(f"{path}.inp").write_text(SEPARATOR.join(TEXTS) + SEPARATOR)
    Path(f"{path}.out").write_text("".join(f"{line}\n" for line in lines))
    assert main(tmp_path) == status
    assert f"4 texts, {status} differ" in capsys.readouterr().out


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    assert main(tmp_path) == 2
