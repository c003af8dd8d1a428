"""Files of the comparison with llama.cpp's quantizer: a killed run leaves no file that the next one takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.llama_quantize import write_once


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "floats.gguf"

    def killed(path: Path) -> None:
        path.write_bytes(b"GG")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_once(out, killed)
    assert not out.exists()
    assert write_once(out, lambda path: path.write_bytes(b"GGUF")) == out
    assert write_once(out, killed).read_bytes() == b"GGUF"
    assert [path.name for path in tmp_path.iterdir()] == ["floats.gguf"]
