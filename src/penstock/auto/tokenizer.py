"""AutoTokenizer: a model's tokenizer with the methods of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.auto.config import existing_path
from penstock.checkpoint.generation import SPECIAL_ROLES, read_tokenizer_config
from penstock.checkpoint.side_files import read_side_files
from penstock.config import check_choice, check_integer
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.llm.generate.callables import as_tensor
from penstock.text.chat_template import find_template, render_chat
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.validation import MAX_TOKEN, refusal, wrong_type

__all__ = ["AutoTokenizer"]


class AutoTokenizer:
    """A callable tokenizer: ``tokenizer(text)["input_ids"]``.

    ``bos_token``, ``eos_token``, ``unk_token``, ``sep_token``, ``pad_token``, ``cls_token`` and ``mask_token`` are the
    texts of special tokens, and the same names with ``_id`` their ids; None if the model has none.  ``padding_side``:
    "left" or "right", by default the model's own.
    """

    padding_side = "right"

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise wrong_type("tokenizer", "a Tokenizer (AutoTokenizer.from_pretrained(PATH) reads one)", tokenizer)
        self._tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, model: Path | str) -> AutoTokenizer:
        """Read the tokenizer of a checkpoint folder, a bundle or a downloaded model."""
        files = read_side_files(existing_path(model))
        tokenizer = cls(Tokenizer(files))
        tokenizer.padding_side = read_tokenizer_config(files).padding_side
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        token, is_id = name.removesuffix("_id"), name.endswith("_id")
        if token not in SPECIAL_ROLES:
            raise AttributeError(f"AutoTokenizer has no attribute {name!r:.60}. LLM.tokenizer has more methods.")
        text = self._tokenizer.special_tokens.get(token)
        return self._tokenizer.token_id(text) if is_id and text is not None else text

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_tensors: str | None = None,
        *,
        padding: bool | str = False,
        padding_side: str | None = None,
    ) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask``: lists for one text, lists of lists for several.

        ``return_tensors``: "np" gives arrays [num_texts, len] int64 and "pt" tensors, for texts of equal length or with
        padding; None gives lists.  ``padding``: True or "longest" pads to the longest text, with 0 in the mask, at
        ``padding_side``.
        """
        is_one = isinstance(text, str) or not isinstance(text, Sequence)  # encode refuses other types
        lists = [self.encode(item, add_special_tokens) for item in ([text] if is_one else text)]
        masks = [[1] * len(ids) for ids in lists]
        if padding not in (False, "do_not_pad"):
            side = check_choice("padding_side", padding_side or self.padding_side, ("left", "right"))
            self._pad(lists, masks, padding, side)
        if return_tensors is None:
            return {"input_ids": lists[0] if is_one else lists, "attention_mask": masks[0] if is_one else masks}
        check_choice("return_tensors", return_tensors, ("np", "pt"))
        if len({len(ids) for ids in lists}) > 1:
            raise InvalidArgumentError(
                f"return_tensors={return_tensors!r} requires texts of equal length, or padding=True; generate takes "
                "lists of any lengths",
                param="return_tensors",
            )
        convert = as_tensor if return_tensors == "pt" else np.asarray
        return {"input_ids": convert(np.array(lists, np.int64)), "attention_mask": convert(np.array(masks, np.int64))}

    def _pad(self, lists: list[list[int]], masks: list[list[int]], padding: object, side: str) -> None:
        """Pad the lists and the masks to one length."""
        if padding not in (True, "longest"):
            raise refusal("padding", "True, False or 'longest'", padding)
        pad = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
        if pad is None:
            raise UnsupportedError("padding: the tokenizer has no pad_token and no eos_token", param="padding")
        longest = max(map(len, lists), default=0)
        for rows, value in ((lists, pad), (masks, 0)):
            for index, row in enumerate(rows):
                fill = [value] * (longest - len(row))
                rows[index] = fill + row if side == "left" else row + fill

    def encode(self, text: Any, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of one text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one token id or several."""
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = list(token_ids) if isinstance(token_ids, Iterable) else [token_ids]
        for token in ids:
            check_integer("token_ids", token, 0, MAX_TOKEN)
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the texts of several lists of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> list[int] | str:
        """Return messages as token ids, or as text without ``tokenize``, by the model's chat template.

        ``add_generation_prompt`` adds the opening of an answer, which ``generate`` needs.  ``continue_final_message``
        ends the prompt after the text of the last message instead.  ``chat_template`` is another template, or the name
        of one of the model's.  ``tools`` are JSON schemas, ``documents`` have a title and a text, and ``variables`` are
        what else the template reads, such as ``enable_thinking``.  Raises UnsupportedError if the model has no template
        that can be used.
        """
        template = self._tokenizer.chat_templates.get(chat_template or "", chat_template)
        if template is None:
            template = find_template(self._tokenizer, has_tools=tools is not None)
        text = render_chat(
            template,
            conversation,
            self._tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer; TextStreamer asks for one."""
        return self._tokenizer.detokenizer()
