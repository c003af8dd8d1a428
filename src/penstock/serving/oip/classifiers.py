"""Classifiers in the Open Inference Protocol: their signature, and texts to scores, entities or answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import FieldError, refuse_if
from penstock.checkpoint.pooling.head import ANSWER_TASK
from penstock.config import show
from penstock.serving.admission import deadline_s, within
from penstock.serving.oip.bodies import Microseconds
from penstock.serving.oip.language import OUTPUTS, ids_of, inputs_of, texts_of
from penstock.serving.oip.tensor_codec import byte_array, frozen
from penstock.serving.openai.bodies import PredictParameters
from penstock.serving.openai.embeddings import pooling_head_of
from penstock.serving.openai.predict import Parameters, answers_to, entities_of, logits_of
from penstock.serving.request_decoding import converted
from penstock.serving.request_fields import ServingFields
from penstock.serving.translation import pair_ids, prompts_of
from penstock.tensors import InferRequest, InferResponse, Tensor
from penstock.text.tasks.classes import ClassificationOptions, scores_of

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.serving.call import Call

__all__ = ["Signature", "classifier_response", "is_classifier", "signature_of"]

_Output = tuple[str, str, tuple[int, ...]]
_TEXT: Final = ("text_input", "BYTES")
_HINT: Final = "triton_enable_empty_final_response"  # ignored: there is one response


@dataclass(frozen=True)
class Signature:
    """The required inputs, each a name and a datatype, and the outputs with their shapes; -1 is any size."""

    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[_Output, ...]
    is_stream: bool = False
    """True if a request may have several responses."""


class _InferFields(ServingFields, kw_only=True):
    """The parameters that every request to a classifier may have."""

    timeout: Microseconds | None = None

    @property
    def timeout_s(self) -> float | None:
        """The time limit in seconds, if there is one."""
        return None if self.timeout is None else self.timeout / 1e6


def is_classifier(backend: Backend) -> bool:
    """Return True for a model with a head of classes, or of the ends of answers."""
    return bool(pooling_head_of(backend).labels)


def signature_of(backend: Backend) -> Signature:
    """Return the inputs and outputs of a model."""
    head = pooling_head_of(backend)
    if head.task == ANSWER_TASK:
        places = tuple((name, "INT32", (-1,)) for name in ("start", "end"))
        outputs = (("answer", "BYTES", (-1,)), ("score", "FP32", (-1,)), *places)
        return Signature((("question", "BYTES"), ("context", "BYTES")), outputs)
    if head.task:
        return Signature((_TEXT,), (("entities", "BYTES", (-1,)),))
    if head.labels:
        return Signature((_TEXT,), (("scores", "FP32", (-1, len(head.labels))), ("label", "BYTES", (-1,))))
    shapes = {"output_ids": (-1, -1)}
    rows = tuple((name, datatype, shapes.get(name, (-1,))) for name, datatype in OUTPUTS.items())
    return Signature((inputs_of(backend.card),), rows, is_stream=True)


async def classifier_response(call: Call, backend: Backend, request: InferRequest) -> InferResponse:
    """Run a request to a classifier: texts, or questions with their contexts, one result for each.

    ``scores`` has the classes in the order of the model's ``id2label``, ``label`` the likeliest.  ``entities`` is a
    JSON list for each text.  Raises FieldError with the name of the input, output or parameter at fault.
    """
    own = {name: value for name, value in request.parameters.items() if name in PredictParameters.__struct_fields__}
    others = {name: value for name, value in request.parameters.items() if name not in own}
    converted(others.pop(_HINT, False), bool, _HINT)
    if isinstance(labels := own.get("ignore_labels"), str):  # a parameter is no list
        own["ignore_labels"] = [label.strip() for label in labels.split(",") if label.strip()]
    body: _InferFields = converted(others, _InferFields)
    parameters = Parameters(converted(own, PredictParameters), "")
    if "top_k" in own:
        raise FieldError("top_k", "top_k: expected none over this protocol, whose outputs have one result for each")
    call.body = body
    signature = signature_of(backend)
    wanted = _wanted(request, signature)
    columns = await within(
        deadline_s(call, body.timeout_s), _columns(call, backend, dict(request.inputs), body, parameters)
    )
    outputs = [_tensor(name, datatype, shape, columns) for name, datatype, shape in signature.outputs if name in wanted]
    return InferResponse(str(backend.card.version), sorted(outputs, key=lambda output: wanted.index(output.name)))


def _wanted(request: InferRequest, signature: Signature) -> list[str]:
    """Return the names of the requested outputs; all if the request names none."""
    names = [name for name, _, _ in signature.outputs]
    for name in request.outputs:
        if name not in names:
            message = f"Unknown output: {show(name)}. Available: {', '.join(names)}."
            raise FieldError(name[:200] or "outputs", message, "unknown")
    return [*(request.outputs or names)]


async def _columns(
    call: Call, backend: Backend, inputs: dict[str, Tensor], body: _InferFields, parameters: Parameters
) -> Mapping[str, Any]:
    """Return the values of each output."""
    head = pooling_head_of(backend)
    if head.task == ANSWER_TASK:
        texts = _texts(inputs, "question", "context")
        pairs = list(zip(texts["question"], texts["context"], strict=True))
        results = await answers_to(call, backend, pairs, body, parameters)
        none = {"answer": "", "score": 0.0, "start": 0, "end": 0}
        return {name: [(each or none)[name] for each in results] for name in none}
    if head.task:
        listed = _texts(inputs, "text_input")["text_input"]
        results = await entities_of(call, backend, listed, body, parameters)
        return {"entities": [json.dumps(each) for each in results]}
    options = parameters.options(ClassificationOptions(), "text_classification")
    logits = await logits_of(call, backend, await _prompts(backend, inputs, body), body)
    scores = [scores_of(each, head.score_function, options) for each in logits]
    return {"scores": scores, "label": [head.labels[int(each.argmax())] for each in scores]}


async def _prompts(backend: Backend, inputs: dict[str, Tensor], body: _InferFields) -> list[list[int]]:
    """Return the token ids of texts, of pairs of texts, or those given."""
    if "text_pair" in inputs:
        texts = _texts(inputs, "text_input", "text_pair")
        pairs = zip(texts["text_input"], texts["text_pair"], strict=True)
        return [await pair_ids(backend, *pair, body, "text_pair") for pair in pairs]
    if "input_ids" in inputs and len(inputs) == 1:
        prompts: Any = ids_of(inputs["input_ids"])
        return [ids for ids, _ in await prompts_of(backend, prompts, "input_ids", body)]
    texts = _texts(inputs, "text_input")
    return [ids for ids, _ in await prompts_of(backend, texts["text_input"], "text_input", body)]


def _texts(inputs: dict[str, Tensor], *names: str) -> dict[str, list[str]]:
    """Return the texts of each input, as many in all of them.  FieldError for other inputs, and for empty texts."""
    for name in inputs:
        if name not in names:
            message = f"Unknown input: {show(name)}. This model has {' and '.join(names)}."
            raise FieldError(name[:200], message, "unknown")
    texts: dict[str, list[str]] = {}
    for name in names:
        if name not in inputs:
            raise FieldError(name, f"{name}: expected the input beside {', '.join(inputs) or 'none'}", "missing")
        texts[name] = texts_of(inputs[name])
        refuse_if("" in texts[name], f"{name}: expected texts that are not empty", name)
        count = len(texts[names[0]])
        refuse_if(len(texts[name]) != count, f"{name}: expected {count} texts, got {len(texts[name])}", name)
    return texts


def _tensor(name: str, datatype: str, shape: tuple[int, ...], columns: Mapping[str, Any]) -> Tensor:
    values = columns[name]
    if datatype == "BYTES":
        return Tensor(name, datatype, byte_array([value.encode() for value in values], (len(values),)))
    kind = {"FP32": np.float32, "INT32": np.int32}[datatype]
    return Tensor(name, datatype, frozen(np.array(values, kind).reshape(len(values), *shape[1:])))
