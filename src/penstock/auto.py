"""AutoConfig, AutoModel and AutoTokenizer: the interface that tutorials of other libraries use.

These are thin wrappers over ``penstock.LLM``.  ``generate`` refuses an option that it does not support.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint.side_files import read_side_files
from penstock.config import ConfigReader, check_integer, parse_object
from penstock.engine.params import SamplingParams
from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.llm.llm import LLM
from penstock.text.tokenizer import Tokenizer
from penstock.validation import MAX_TOKEN, refusal, wrong_type

__all__ = ["AutoConfig", "AutoModel", "AutoTokenizer"]

_OPTIONS = ("temperature", "top_k", "top_p", "seed", "stop", "ignore_eos")


def _path(model: object) -> Path:
    if not isinstance(model, (str, os.PathLike)):
        raise wrong_type("model", "the path of a checkpoint folder or a .psm bundle", model)
    return Path(model)


class AutoConfig(ConfigReader):
    """A model's ``config.json``, with the folder or bundle that it was read from.

    Keys are attributes (``config.hidden_size``).  The typed getters of ``ConfigReader`` check the values.
    """

    folder: Path | None = None

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"{self.__dict__.get('file', 'config')} has no {name!r}")

    @classmethod
    def from_pretrained(cls, model: Path | str) -> AutoConfig:
        """Read the config of a checkpoint folder or a bundle."""
        path = _path(model)
        data = read_side_files(path, ["config.json"])
        if "config.json" not in data:
            raise FileAccessError(f"{path}: no config.json found")
        config = cls(parse_object(data["config.json"], str(path / "config.json")), str(path / "config.json"))
        config.folder = path
        return config


class AutoTokenizer:
    """A callable tokenizer: ``tokenizer(text)["input_ids"]``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, model: Path | str) -> AutoTokenizer:
        """Read the tokenizer of a checkpoint folder or a bundle."""
        path = _path(model)
        files = read_side_files(path)
        return cls(Tokenizer(files))

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask``: lists for one text, lists of lists for several."""
        if isinstance(text, str) or not isinstance(text, Sequence):  # encode refuses other types
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        lists = [self.encode(item, add_special_tokens) for item in text]
        return {"input_ids": lists, "attention_mask": [[1] * len(ids) for ids in lists]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of one text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one token id or several."""
        ids = list(token_ids) if isinstance(token_ids, Iterable) else [token_ids]
        for token in ids:
            check_integer("token_ids", token, 0, MAX_TOKEN)
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]


class AutoModel:
    """A model whose ``generate`` takes and returns token ids."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    def from_config(cls, config: AutoConfig, **options: Any) -> AutoModel:
        """Open the model of a config from ``AutoConfig.from_pretrained``; ``options`` as for ``penstock.LLM``."""
        if not isinstance(config, AutoConfig) or config.folder is None:
            raise InvalidArgumentError(
                "config has no folder, so there are no weights; use AutoConfig.from_pretrained(folder)"
            )
        return cls.from_pretrained(config.folder, **options)

    @classmethod
    def from_pretrained(cls, model: Path | str, **options: Any) -> AutoModel:
        """Open a checkpoint folder or a bundle; ``options`` as for ``penstock.LLM``."""
        return cls(LLM(model, **options))

    def generate(
        self,
        input_ids: Sequence[int] | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        **options: Any,
    ) -> list[list[int]]:
        """Continue one prompt or several; each returned list begins with its prompt.

        ``input_ids``: a list of token ids or a list of lists.  ``do_sample``: False is greedy; True samples with
        ``temperature``, by default the model's or 1; None follows the model's defaults.  ``options`` are these fields
        of ``penstock.SamplingParams``: temperature, top_k, top_p, seed, stop, ignore_eos.
        """
        if do_sample not in (None, True, False):
            raise refusal("do_sample", "True or False", do_sample)
        for name in options:
            if name not in _OPTIONS:
                raise InvalidArgumentError(
                    f"generate: unknown option {name!r}; expected max_new_tokens, do_sample, {', '.join(_OPTIONS)}"
                )
        if do_sample is False:
            if options.get("temperature"):
                raise InvalidArgumentError(f"temperature {options['temperature']!r} requires do_sample=True")
            options["temperature"] = 0.0
        elif do_sample and options.get("temperature") is None:
            options["temperature"] = self.llm.generation.temperature or 1.0
        elif do_sample and options["temperature"] == 0:
            raise InvalidArgumentError("do_sample=True requires a temperature above 0")
        if hasattr(input_ids, "tolist"):
            input_ids = input_ids.tolist()
        params = SamplingParams(max_tokens=max_new_tokens, **options)
        results = self.llm.generate(input_ids, params)
        result_list = results if isinstance(results, list) else [results]
        return [result.prompt_token_ids + result.token_ids for result in result_list]

    def close(self) -> None:
        """Free the memory."""
        self.llm.close()
