"""Arguments of a wrong type are refused by name, before they reach a library."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import AutoConfig, AutoTokenizer, Client, SamplingParams
from penstock.checkpoint.side_files import read_side_files
from penstock.errors import InvalidArgumentError
from penstock.llm.sampling_keywords import sampling_params
from penstock.text.tokenizer import Tokenizer
from tests.support.command import DEMO
from tests.support.errors import raises

WRONG = {
    "AutoTokenizer.from_pretrained": (lambda: AutoTokenizer.from_pretrained(3), "model"),
    "AutoConfig.from_pretrained": (lambda: AutoConfig.from_pretrained(3), "model"),
    "Client": (lambda: Client("http://localhost:1", api_key=3), "api_key"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_named(name: str) -> None:
    call, param = WRONG[name]
    with raises(InvalidArgumentError, param=param):
        call()


def test_decode_refuses_what_are_no_token_ids() -> None:
    tokenizer = Tokenizer(read_side_files(DEMO))
    for wrong, param in ((["a"], "ids[0]"), (3, "ids"), (None, "ids")):
        with raises(InvalidArgumentError, param=param):
            tokenizer.decode(wrong)  # type: ignore[arg-type]
    ids = tokenizer.encode("def")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(ids) == "def"  # type: ignore[arg-type]
    assert tokenizer.decode([]) == ""


def test_a_keyword_beside_params_must_be_one_of_them() -> None:
    with raises(InvalidArgumentError, param="use_cache", match="generate has no option 'use_cache'"):
        sampling_params(SamplingParams(), {"use_cache": False}, 0.0, "generate")
    with raises(InvalidArgumentError, param="top_k", match="top_k: set it in params"):
        sampling_params(SamplingParams(), {"top_k": 2}, 0.0, "generate")
