"""Read the pooling head from a folder: classifiers of transformers, and the files of sentence-transformers.

The formats are those of transformers 5 (the class that ``architectures`` names) and of sentence-transformers 5
(``modules.json``, ``N_Pooling/config.json``, ``N_Dense/`` and ``config_sentence_transformers.json``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from penstock.checkpoint.generation import read_tokenizer_config
from penstock.checkpoint.pooling.head import (
    ALL_ROWS,
    ANSWER_TASK,
    SCORE_FUNCTIONS,
    TOKEN_TASK,
    HeadLayer,
    PoolingHead,
    read_prompts,
)
from penstock.checkpoint.pooling.logit_score import (
    DECLARED,
    check_architecture,
    declared_tokens,
    message_format,
    token_layer,
)
from penstock.checkpoint.pooling.stored import Tensors, read_linear, read_vector
from penstock.checkpoint.pooling.yes_no import LOGIT_LABEL
from penstock.checkpoint.side_files import MODULE_FOLDER, model_folder, read_modules, read_small_file
from penstock.checkpoint.tensor_file import TensorFile
from penstock.config import ConfigReader, show
from penstock.errors import InvalidFileError, UnsupportedError

__all__ = [
    "MODULE_FILE", "POOLING_INPUTS", "classifier_names", "classifier_tensors", "has_language_head", "has_segments",
    "make_pooling_head", "network_score_function", "pooling_files",
]  # fmt: skip

TRANSFORMER_FILES: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The names of the file that says how texts are cut, in the order in which sentence-transformers looks for them."""

POOLING_INPUTS: Final = ("modules.json", "config_sentence_transformers.json", *TRANSFORMER_FILES)
"""The files at the top of a folder that say how texts become vectors."""

MODULE_FILE: Final = re.compile(MODULE_FOLDER.pattern + r"/(config\.json|model\.safetensors)")
"""The names of the files of a module, such as 1_Pooling or 2_Dense."""

_MAX_BYTES: Final = 1 << 20


class _Classifier(NamedTuple):
    """The head of a class: linears by the name of their tensors, each with its activation, and a norm of the first.

    ``pooling`` is that of the class; "late" for EuroBERT's, which config.json names.  ``task``: as in PoolingHead.
    """

    pooling: str
    layers: tuple[tuple[str, str], ...]
    norm: str = ""
    has_segments: bool = False
    task: str = ""


def _cls(*layers: tuple[str, str], norm: str = "", has_segments: bool = False) -> _Classifier:
    return _Classifier("cls", layers, norm, has_segments)


_ROBERTA: Final = _cls(("classifier.dense", "tanh"), ("classifier.out_proj", "identity"))
_DECODER: Final = _Classifier("last", (("score", "identity"),))
_CLASSIFIER: Final = ("classifier", "identity")
_OF_TEXTS: Final = {
    "Albert": _cls(("albert.pooler", "tanh"), _CLASSIFIER, has_segments=True),
    "Bert": _cls(("bert.pooler.dense", "tanh"), _CLASSIFIER, has_segments=True),
    "Camembert": _ROBERTA,
    "DebertaV2": _cls(("pooler.dense", "gelu"), _CLASSIFIER),
    "DistilBert": _cls(("pre_classifier", "relu"), _CLASSIFIER),
    "Electra": _cls(("classifier.dense", "gelu"), ("classifier.out_proj", "identity"), has_segments=True),
    "EuroBert": _Classifier("late", (("dense", "gelu"), _CLASSIFIER)),
    "MPNet": _ROBERTA,
    "ModernBert": _cls(("head.dense", "gelu"), _CLASSIFIER, norm="head.norm"),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Llama": _DECODER,
    "Mistral": _DECODER,
    "Qwen2": _DECODER,
    "Qwen3": _DECODER,
}
"""The classifiers of texts, by the beginning of the names of transformers' classes."""


def _classes() -> dict[str, _Classifier]:
    """Return the classes with a head of classes: of texts, of tokens, and of the two ends of an answer."""
    table = {f"{base}ForSequenceClassification": form for base, form in _OF_TEXTS.items()}
    for base, form in _OF_TEXTS.items():
        if form is _DECODER:
            continue
        behind = form.layers[:1] if form.norm else ()  # ModernBERT's layer before the classifier
        of_tokens = _Classifier(ALL_ROWS, (*behind, _CLASSIFIER), form.norm, task=TOKEN_TASK)
        table[f"{base}ForTokenClassification"] = of_tokens
        if base == "EuroBert":
            continue
        ends = _CLASSIFIER if form.norm else ("qa_outputs", "identity")
        table[f"{base}ForQuestionAnswering"] = of_tokens._replace(
            layers=(*behind, ends), has_segments=form.has_segments, task=ANSWER_TASK
        )
    return table


_CLASSIFIERS: Final = _classes()
_BARE: Final = frozenset(f"{base}Model" for base in _OF_TEXTS) | {
    "ElectraForPreTraining", "Gemma3TextModel", "NomicBertModel", "T5EncoderModel", "UMT5EncoderModel",
}  # fmt: skip


def classifier_names(base: str) -> list[str]:
    """Return the names of the classes with a head of classes of a family; ``base`` begins them."""
    return [name for name in _CLASSIFIERS if name.startswith(f"{base}For")]


def has_language_head(config: ConfigReader) -> bool:
    """Return False for a folder of a bare model or a classifier, which has no logits of tokens."""
    names = config.text_list("architectures") or []
    return not any(name in _CLASSIFIERS or name in _BARE for name in names)


def _classifier_of(config: ConfigReader) -> _Classifier | None:
    names = config.text_list("architectures") or []
    return _CLASSIFIERS.get(names[0]) if len(names) == 1 else None


def classifier_tensors(config: ConfigReader) -> set[str]:
    """Return the names that the tensors of a classifier's head may have."""
    form = _classifier_of(config)
    parts = [] if form is None else [*(name for name, _ in form.layers), *filter(None, [form.norm])]
    return {f"{part}.{leaf}" for part in parts for leaf in ("weight", "bias")}


def has_segments(config: ConfigReader) -> bool:
    """Return True for a classifier that distinguishes the two texts of a pair by a table of token types."""
    form = _classifier_of(config)
    return form is not None and form.has_segments and config.int("type_vocab_size", 2) > 1


def make_pooling_head(folder: Path, config: ConfigReader, stored: Tensors) -> PoolingHead | None:
    """Return the pooling head of a checkpoint folder; None if its files say nothing about one.

    Raises InvalidFileError and UnsupportedError, which name the file and the key.
    """
    classifier = _classifier_of(config)
    if classifier is not None:
        return _read_classifier(config, classifier, stored)
    if (folder / "modules.json").exists():
        return _read_modules(folder, config, stored)
    if not config.bool(DECLARED, False):
        return None
    check_architecture(config)
    layer = token_layer(config, stored, *declared_tokens(folder, config))
    return PoolingHead("last", (layer,), labels=(LOGIT_LABEL,), score_function="sigmoid", pair_format="qwen3")


def pooling_files(folder: Path) -> list[str]:
    """Return the names of the files of sentence-transformers in a folder; a copy of the folder needs them.

    Raises InvalidFileError for a module in a folder with a name of another form than 1_Pooling.
    """
    names = [name for name in POOLING_INPUTS if (folder / name).exists()]
    for module in read_modules(folder):
        place = module.str("path", "")
        for name in (f"{place}/config.json", f"{place}/model.safetensors") if place else ():
            if MODULE_FILE.fullmatch(name) is None:
                raise module.error("path", "the name of a folder such as 1_Pooling", place)
            names += [name] if (folder / name).exists() else []
    return names


def _read_classifier(config: ConfigReader, form: _Classifier, stored: Tensors) -> PoolingHead:
    layers = [read_linear(stored, name, activation) for name, activation in form.layers]
    pooling = form.pooling
    if form.norm:  # ModernBERT's head
        config.one_of("classifier_activation", ("gelu",), "gelu")
        if not form.task:
            pooling = config.one_of("classifier_pooling", ("cls", "mean"), "cls")
        norm_bias = read_vector(stored, f"{form.norm}.bias") if config.bool("norm_bias", False) else None
        layers[0] = HeadLayer(
            layers[0].weight,
            layers[0].bias,
            layers[0].activation,
            read_vector(stored, f"{form.norm}.weight"),
            norm_bias,
            config.float("norm_eps", 1e-5),
        )
    elif form.pooling == "late":
        pooling = _eurobert_pooling(config)
    num_labels = layers[-1].weight.shape[0]
    if form.task == ANSWER_TASK:
        if num_labels != 2:
            raise config.error("id2label", "two classes, the beginning and the end of an answer", num_labels)
        labels: tuple[str, ...] = ("start", "end")
        score_function = "identity"
    else:
        labels = _read_labels(config, num_labels)
        score_function = "softmax" if form.task else _read_score_function(config, num_labels)
    return PoolingHead(
        "mean" if pooling == "late" else pooling,
        tuple(layers),
        pools_layers=pooling == "late",
        labels=labels,
        score_function=score_function,
        segment_offset=config.int("vocab_size") if has_segments(config) else 0,
        task=form.task,
    )


def _eurobert_pooling(config: ConfigReader) -> str:
    """Return "cls", "mean" or "late", which is the mean of the logits of all tokens.

    The key is ``classifier_pooling`` in transformers and ``clf_pooling`` in the folders that were published before it.
    """
    keys = [key for key in ("classifier_pooling", "clf_pooling") if config.has(key)] or ["classifier_pooling"]
    values = [config.one_of(key, ("bos", "mean", "late"), "late") for key in keys]
    if values[0] != values[-1]:
        raise config.error(keys[1], f"{values[0]}, as {keys[0]} has it", values[1])
    return "cls" if values[0] == "bos" else values[0]


def _read_labels(config: ConfigReader, num_labels: int) -> tuple[str, ...]:
    section = config.object("id2label")
    if section is None:
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    if set(section.values) != {str(index) for index in range(num_labels)}:
        raise config.error("id2label", f"a name for each of {num_labels} classes", section.values)
    return tuple(section.str(str(index)) for index in range(num_labels))


def _read_score_function(config: ConfigReader, num_labels: int) -> str:
    """Return what sentence-transformers applies to logits if its keys exist, otherwise what transformers applies."""
    section = config.object("sentence_transformers") or ConfigReader({}, config.file)
    name = section.optional_str("activation_fn") or config.optional_str("sbert_ce_default_activation_function")
    if name is not None:
        return _torch_name(name, "activation_fn", SCORE_FUNCTIONS, config.file)
    return network_score_function(config, num_labels)


def network_score_function(config: ConfigReader, num_labels: int) -> str:
    """Return what the pipeline of transformers applies to the logits of a classifier."""
    kinds = ("", "regression", "single_label_classification", "multi_label_classification")
    kind = kinds[0] if not config.has("problem_type") else config.one_of("problem_type", kinds)
    if kind == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or kind == "multi_label_classification" else "softmax"


def _torch_name(name: str, key: str, known: Sequence[str] | Mapping[str, object], file: str) -> str:
    """Return the name of an activation from that of its class in torch.nn."""
    short = name.rsplit(".", 1)[-1].lower()
    if not name.startswith("torch.nn.modules.") or short not in known:
        raise UnsupportedError(
            f"{file}: {key}: expected a class of torch.nn.modules, one of {', '.join(known)}; got {show(name)}",
            param=key,
        )
    return short


def _read_modules(folder: Path, config: ConfigReader, stored: Tensors) -> PoolingHead:
    """Return the head that modules.json of sentence-transformers describes."""
    modules = read_modules(folder)
    if [_kind(module) for module in modules] == ["Transformer", "LogitScore"]:
        return _read_logit_score(folder, modules[1], config, stored)
    pooling, normalize, layers = "", False, []
    for index, module in enumerate(modules):
        kind, place = _kind(module), module.str("path", "")
        if normalize or (kind == "Pooling" and (pooling or index != 1)) or (kind == "Dense" and not pooling):
            raise module.error("type", "Transformer, then Pooling, then Dense and Normalize", kind)
        if kind == "Transformer" and index == 0:
            if folder / place != model_folder(folder):
                raise module.error("path", "that of the folder with config.json", place)
        elif kind == "Pooling":
            pooling = _read_pooling(_module_config(folder, module, place))
        elif kind == "Dense":
            layers.append(_read_dense(folder, module, place))
        elif kind == "Normalize":
            normalize = True
        else:
            raise module.error("type", "Transformer, Pooling, Dense or Normalize", kind)
    if not pooling:
        raise InvalidFileError("modules.json: expected a module of type Pooling, got none", param="modules.json")
    transformer, (prompts, default_prompt) = _transformer_file(folder), _read_prompts(folder)
    return PoolingHead(
        pooling,
        tuple(layers),
        normalize,
        prompts=prompts,
        default_prompt=default_prompt,
        max_text_len=_max_text_len(folder, transformer),
        lowercase=transformer.bool("do_lower_case", False),
    )


def _kind(module: ConfigReader) -> str:
    """Return the name of a module's class."""
    return module.str("type").rsplit(".", 1)[-1]


def _read_logit_score(folder: Path, module: ConfigReader, config: ConfigReader, stored: Tensors) -> PoolingHead:
    """Return the head of a causal model whose modules are Transformer and LogitScore."""
    check_architecture(config)
    own = _module_config(folder, module, module.str("path", ""))
    if own.has("module_input_name"):
        own.one_of("module_input_name", ("causal_logits",))
    layer = token_layer(config, stored, own.int("true_token_id", min=0), own.optional_int("false_token_id", min=0))
    pair_format, generates = message_format(_transformer_file(folder))
    own_prompts, default_prompt = _read_prompts(folder)
    activation = _optional_file(folder, "config_sentence_transformers.json").optional_str("activation_fn")
    function = "torch.nn.modules.activation.Sigmoid" if activation is None else activation
    return PoolingHead(
        "last",
        (layer,),
        labels=(LOGIT_LABEL,),
        score_function=_torch_name(function, "activation_fn", SCORE_FUNCTIONS, "config_sentence_transformers.json"),
        prompts=own_prompts,
        default_prompt=default_prompt,
        pair_format=pair_format,
        add_generation_prompt=generates,
    )


def _transformer_file(folder: Path) -> ConfigReader:
    """Return the file that says how texts are cut, the first of its seven names; empty without one."""
    own = model_folder(folder)
    name = next((name for name in TRANSFORMER_FILES if (own / name).exists()), TRANSFORMER_FILES[0])
    return _optional_file(own, name)


def _optional_file(folder: Path, name: str) -> ConfigReader:
    """Return a config file of the folder, empty if it does not exist."""
    path = folder / name
    return ConfigReader.parse(read_small_file(path, _MAX_BYTES), name) if path.exists() else ConfigReader({}, name)


def _module_config(folder: Path, module: ConfigReader, place: str) -> ConfigReader:
    """Return config.json of a module; its path is the name of a folder, never one that leads out."""
    if not place.isprintable() or place.startswith(".") or not place or any(char in place for char in "/\\:"):
        raise module.error("path", "the name of a folder", place)
    return ConfigReader.parse(read_small_file(folder / place / "config.json", _MAX_BYTES), f"{place}/config.json")


_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


def _read_pooling(config: ConfigReader) -> str:
    """Return the one pooling that is switched on.  A newer file has it as ``pooling_mode``."""
    if not config.bool("include_prompt", True):
        raise config.error("include_prompt", "true", False)
    if config.has("pooling_mode"):
        mode = config.one_of("pooling_mode", ("cls", "mean", "max", "lasttoken"))
        return "last" if mode == "lasttoken" else mode
    for key, value in config.values.items():
        if key.startswith("pooling_mode_") and key not in _MODES and value not in (False, None):
            name, expected = show(key)[1:-1], ", ".join(_MODES)
            raise UnsupportedError(f"{config.file}: {name}: expected one of {expected} instead", param=name)
    chosen = [pooling for key, pooling in _MODES.items() if config.bool(key, False)]
    if len(chosen) != 1:
        raise config.error("pooling_mode_mean_tokens", "one mode of pooling that is true", f"{len(chosen)} modes")
    return chosen[0]


def _read_dense(folder: Path, module: ConfigReader, place: str) -> HeadLayer:
    config = _module_config(folder, module, place)
    activation = _torch_name(
        config.str("activation_function", "torch.nn.modules.activation.Tanh"),
        "activation_function",
        ("identity", "tanh", "gelu", "relu", "sigmoid", "silu"),
        config.file,
    )
    path = folder / place / "model.safetensors"
    if not path.exists():
        raise InvalidFileError(f"{place}: expected model.safetensors, got no file")
    layer = read_linear(TensorFile(path), "linear", activation)
    expected = (config.int("out_features"), config.int("in_features"))
    if layer.weight.shape != expected or (layer.bias is not None) is not config.bool("bias", True):
        raise config.error("out_features", "the sizes of linear.weight and linear.bias", list(layer.weight.shape))
    return layer


def _max_text_len(folder: Path, transformer: ConfigReader) -> int:
    """Return the tokens that a text is cut to: ``max_seq_length``, else ``model_max_length`` of the tokenizer, or 0."""
    limit = transformer.optional_int("max_seq_length")
    if limit is not None:
        return limit
    path = model_folder(folder) / "tokenizer_config.json"
    return (read_tokenizer_config({path.name: read_small_file(path)}).max_len or 0) if path.exists() else 0


def _read_prompts(folder: Path) -> tuple[dict[str, str], str]:
    config = _optional_file(folder, "config_sentence_transformers.json")
    prompts, default = read_prompts(config), config.optional_str("default_prompt_name") or ""
    if default and default not in prompts:
        raise config.error("default_prompt_name", "the name of a prompt", default)
    return prompts, default
