"""Arguments of a wrong type are refused by name, before they reach a library."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import AutoConfig, AutoTokenizer, Client
from penstock.checkpoint.side_files import read_side_files
from penstock.errors import InvalidArgumentError
from penstock.text.tokenizer import Tokenizer
from tests.support.command import DEMO

WRONG = {
    "AutoTokenizer.from_pretrained": (lambda: AutoTokenizer.from_pretrained(3), "model: expected the path .* got int"),
    "AutoConfig.from_pretrained": (lambda: AutoConfig.from_pretrained(3), "model: expected the path .* got int"),
    "Client": (lambda: Client("http://localhost:1", api_key=3), "api_key: expected a string"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        call()


def test_decode_refuses_what_are_no_token_ids() -> None:
    tokenizer = Tokenizer(read_side_files(DEMO))
    for wrong, message in ((["a"], r"ids\[0\]: expected an integer"), (3, "ids: expected a list"), (None, "ids: ")):
        with pytest.raises(InvalidArgumentError, match=f"^{message}"):
            tokenizer.decode(wrong)  # type: ignore[arg-type]
    ids = tokenizer.encode("def")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(ids) == "def"  # type: ignore[arg-type]
    assert tokenizer.decode([]) == ""
