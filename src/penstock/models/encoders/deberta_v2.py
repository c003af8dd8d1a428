"""DeBERTa v2 and v3 (He et al., arXiv 2006.03654, 2111.09543): content and positions attend to each other.

The projections of the table of relative positions do not depend on the input.  They are computed when weights are read:
a layer has one matrix for each head, which makes the scores of a row for all buckets of distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from penstock.checkpoint.sources import Projection, Source, Sources
from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.models.encoders.bert import AddNorm, BertConfig, BertPredictions, check_architecture
from penstock.models.layer_norm.parts import GELU_FORMS, read_gelu
from penstock.nn import (
    Batch,
    DisentangledAttention,
    Embedding,
    HeadLinear,
    LayerNorm,
    Linear,
    LMHead,
    Module,
    OutputRows,
    TokenShift,
    gelu,
    relu,
    softcap,
)
from penstock.nn.base import Tensor, nn

__all__ = ["Config", "Network", "distance_columns"]

_MAX_REACH: Final = 1 << 16
_MAX_CONV: Final = 31


@dataclass(frozen=True)
class DebertaConfig(BertConfig):
    """The sizes of the network.

    ``num_buckets`` is the half of the rows of the table of relative positions, ``columns`` the row of it by distance,
    and ``kinds`` the parts of the scores by distance: "c2p" of a query's content, "p2c" of a key's.  With ``shared``
    the projections of content are those of positions, too.  ``norm_table``: the table has a layer norm.
    ``has_positions``: the embeddings have absolute positions.  ``is_legacy``: the masked-language head is that of
    transformers.  ``conv_size``: the tokens that a convolution beside the first layer reads, 0 without one;
    ``conv_act`` is its activation.
    """

    num_buckets: int = 0
    columns: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    shared: bool = False
    norm_table: bool = False
    has_positions: bool = True
    is_legacy: bool = True
    conv_size: int = 0
    conv_act: str = "tanh"


def distance_columns(reach: int, max_distance: int, num_buckets: int, *, is_log: bool) -> tuple[int, ...]:
    """Return the row of the table of relative positions by key position - query position, from -reach to reach.

    Distances up to half of ``num_buckets`` have a row each, and larger ones share rows by their logarithm, up to
    ``max_distance``.  Without ``is_log`` all have a row each.  In float32, as in transformers.
    """
    relative = -np.arange(-reach, reach + 1)
    places = relative.astype(np.float32)
    if is_log:
        middle = num_buckets // 2
        far = np.maximum(np.abs(relative), middle).astype(np.float32) / np.float32(middle)
        span = np.log(np.float32((max_distance - 1) / middle))
        logs = np.ceil(np.log(far) / span * np.float32(middle - 1)) + np.float32(middle)
        places = np.where(np.abs(relative) <= middle, places, logs * np.sign(relative))
    rows = np.clip(places.astype(np.int64) + num_buckets, 0, 2 * num_buckets - 1)
    return tuple(rows.tolist())


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DebertaConfig:
        """Read and check config.json; errors name the key."""
        has_head = check_architecture(reader, "DebertaV2")
        hidden_size, num_heads = reader.int("hidden_size", 1536), reader.int("num_attention_heads", 24)
        if hidden_size % num_heads:
            raise reader.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})", hidden_size)
        for key, expected in (
            ("attention_head_size", hidden_size // num_heads), ("embedding_size", hidden_size),
            ("conv_groups", 1), ("type_vocab_size", 0),
        ):  # fmt: skip
            if reader.int(key, expected, min=0) != expected:
                raise reader.error(key, str(expected), reader.int(key, min=0))
        if not reader.bool("relative_attention", False):
            raise reader.error("relative_attention", "true", False)
        reader.one_of("pooler_hidden_act", ("gelu",), "gelu")
        context_len = reader.int("max_position_embeddings", 512, max=_MAX_REACH)
        max_distance = reader.int("max_relative_positions", -1, min=-1, max=_MAX_REACH)
        max_distance = context_len if max_distance < 1 else max_distance
        num_buckets = reader.int("position_buckets", -1, min=-1, max=_MAX_REACH)
        is_log = num_buckets > 0
        if is_log and not 4 <= num_buckets < max_distance:
            raise reader.error(
                "position_buckets", f"4 to {max_distance - 1}, below max_relative_positions", num_buckets
            )
        num_buckets = num_buckets if is_log else max_distance
        return DebertaConfig(
            vocab_size=reader.int("vocab_size", 128100),
            hidden_size=hidden_size,
            intermediate_size=reader.int("intermediate_size", 6144),
            num_layers=reader.int("num_hidden_layers", 24, max=MAX_LAYERS),
            num_heads=num_heads,
            context_len=context_len,
            norm_eps=reader.float("layer_norm_eps", 1e-7),
            tied=True,
            has_head=has_head,
            gelu_form=read_gelu(reader, "hidden_act", "gelu"),
            num_buckets=num_buckets,
            columns=distance_columns(context_len - 1, max_distance, num_buckets, is_log=is_log),
            kinds=_read_kinds(reader),
            shared=reader.bool("share_att_key", False),
            norm_table=reader.one_of("norm_rel_ebd", ("none", "layer_norm"), "none") == "layer_norm",
            has_positions=reader.bool("position_biased_input", True),
            # folders of the paper's authors name no class, and have the head that they trained
            is_legacy=reader.bool("legacy", reader.has("architectures")),
            conv_size=_read_conv_size(reader),
            conv_act=reader.one_of("conv_act", ("tanh", "relu", *GELU_FORMS), "tanh"),
        )


def _read_conv_size(reader: ConfigReader) -> int:
    """Return the tokens that the convolution reads, an odd number, or 0 without one."""
    size = reader.int("conv_kernel_size", 0, min=0, max=_MAX_CONV)
    if size and size % 2 == 0:
        raise reader.error("conv_kernel_size", "0 or an odd number", size)
    return size


def _read_kinds(reader: ConfigReader) -> tuple[str, ...]:
    """Return the parts of ``pos_att_type``, a list or one text with bars."""
    value = reader.values.get("pos_att_type")
    is_list = isinstance(value, list)
    names = reader.text_list("pos_att_type") if is_list else (reader.optional_str("pos_att_type") or "").split("|")
    kinds = tuple(sorted({name.strip().lower() for name in names or ()} - {""}))
    if not kinds or not set(kinds) <= {"c2p", "p2c"}:
        raise reader.error("pos_att_type", "c2p, p2c or both", value)
    return kinds


class DebertaEmbeddings(Module):
    """The rows of tokens, with those of positions if the network has them, normalised."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.has_positions = config.has_positions
        if config.has_positions:
            self.position_embeddings = Embedding(config.context_len, config.hidden_size)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Return the rows of a step, [T, hidden]."""
        x = self.word_embeddings(batch.token_ids)
        return self.LayerNorm(x + self.position_embeddings(batch.positions) if self.has_positions else x)


class DebertaSelfAttention(Module):
    """Attention over all tokens of a request, with parts by distance, without the output linear."""

    c2p: HeadLinear
    p2c: HeadLinear

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.num_heads, self.head_dim, self.kinds = heads, size // heads, config.kinds
        self.query_proj = Linear(size, size, True)
        self.key_proj = Linear(size, size, True)
        self.value_proj = Linear(size, size, True)
        for kind in config.kinds:
            setattr(self, kind, HeadLinear(heads, self.head_dim, 2 * config.num_buckets))
        scale = (self.head_dim * (1 + len(config.kinds))) ** -0.5
        self.attention = DisentangledAttention(heads, self.head_dim, config.columns, scale=scale)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        layers = (self.query_proj, self.key_proj, self.value_proj)
        q, k, v = (layer(x).view(-1, self.num_heads, self.head_dim) for layer in layers)
        c2p = self.c2p(q) if "c2p" in self.kinds else None
        p2c = self.p2c(k) if "p2c" in self.kinds else None
        return self.attention.store_and_attend(q, k, v, batch, c2p=c2p, p2c=p2c)


class DebertaLayer(Module):
    """Attention and feed-forward, each followed by the norm of its sum with the residual stream."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        own = {"self": DebertaSelfAttention(config), "output": AddNorm(config.hidden_size, config)}
        self.attention = nn.ModuleDict(own)
        dense = Linear(config.hidden_size, config.intermediate_size, True)
        self.intermediate = nn.ModuleDict({"dense": dense})
        self.output = AddNorm(config.intermediate_size, config)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        x = self.attention["output"](self.attention["self"](x, batch), x)
        return self.output(gelu(self.intermediate["dense"](x), self.gelu_form), x)


class DebertaConv(Module):
    """A convolution over the embeddings of neighbouring tokens, added to the output of the first layer.

    Each tap of the kernel is a linear, whose rows are those of the token at its distance.
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        middle = config.conv_size // 2
        self.taps = nn.ModuleList(Linear(size, size, tap == middle) for tap in range(config.conv_size))
        offsets = [tap - middle for tap in range(config.conv_size) if tap != middle]
        self.shifts = nn.ModuleList(TokenShift(heads, size // heads, offset) for offset in offsets)
        self.LayerNorm = LayerNorm(size, config.norm_eps)
        self.act = config.conv_act

    def forward(self, embedded: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Return the norm of x [T, hidden] and the convolution of ``embedded`` [T, hidden]: [T, hidden]."""
        taps = list(self.taps.children())
        y: Tensor = taps.pop(len(taps) // 2)(embedded)
        for tap, shift in zip(taps, self.shifts.children(), strict=True):
            y = y + shift(tap(embedded), batch)
        if self.act in GELU_FORMS:
            y = gelu(y, GELU_FORMS[self.act])
        else:
            y = relu(y) if self.act == "relu" else softcap(y, 1.0)
        return self.LayerNorm(x + y)


class DebertaEncoder(Module):
    """The network without its head: token ids to hidden rows."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.embeddings = DebertaEmbeddings(config)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(DebertaLayer(config) for _ in range(config.num_layers))})
        self.has_conv = config.conv_size > 0
        if self.has_conv:
            self.encoder["conv"] = DebertaConv(config)

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden rows of a step, [T, hidden]."""
        x = embedded = self.embeddings(batch)
        for index, layer in enumerate(self.encoder["layer"].children()):
            x = layer(x, batch)
            if index == 0 and self.has_conv:
                x = self.encoder["conv"](embedded, x, batch)
        return x


class AuthorsHead(Module):
    """The masked-language head of the paper's authors."""

    def __init__(self, config: DebertaConfig, words: Embedding) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size, True)
        self.LayerNorm = LayerNorm(config.hidden_size, config.norm_eps)
        self.decoder = LMHead(config.hidden_size, config.vocab_size, True, tied=words)
        self.gelu_form = config.gelu_form

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits [R, vocab] of x [R, hidden]."""
        return self.decoder(self.LayerNorm(gelu(self.dense(x), self.gelu_form)))


class Network(Module):
    """The encoder with its masked-language head.

    Without one, the table of tokens takes its place, and only the hidden rows mean something.
    """

    tensor_prefix = "deberta."
    unread_tensors = (
        *("embeddings.position_ids", "deberta.embeddings.position_ids", "pooler.*", "mask_predictions.*"),
        *("cls.predictions.bias", "cls.predictions.decoder.*", "lm_predictions.lm_head.bias", "*.encoder.LayerNorm.*"),
        *("*.pos_key_proj.*", "*.pos_query_proj.*", "encoder.LayerNorm.*"),
    )
    tied_tensors: ClassVar[Mapping[str, str]] = {"cls.predictions.decoder.bias": "cls.predictions.bias"}

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.config = config
        self.deberta = DebertaEncoder(config)
        self.output_rows = OutputRows()
        words = self.deberta.embeddings.word_embeddings
        if not config.has_head:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, tied=words)
        elif config.is_legacy:
            self.cls = nn.ModuleDict({"predictions": BertPredictions(config, words)})
        else:
            self.lm_predictions = nn.ModuleDict({"lm_head": AuthorsHead(config, words)})

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of the wanted rows, [R, vocab]."""
        x = self.output_rows(self.deberta(batch), batch.output_rows)
        if not self.config.has_head:
            return self.lm_head(x)
        head = self.cls["predictions"] if self.config.is_legacy else self.lm_predictions["lm_head"]
        logits: Tensor = head(x)
        return logits

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from that are not the tensor of their name."""
        config, table = self.config, {}
        own = {"c2p": "key_proj", "p2c": "query_proj"}
        for index in range(config.num_layers):
            path = f"deberta.encoder.layer.{index}.attention.self"
            for kind in config.kinds:
                layer = f"{path}.{own[kind]}" if config.shared else f"{path}.pos_{own[kind]}"
                norm = "deberta.encoder.LayerNorm" if config.norm_table else ""
                projection = Projection(f"{layer}.weight", f"{layer}.bias", config.num_heads, norm, config.norm_eps)
                rel = Source("deberta.encoder.rel_embeddings.weight", projection=projection)
                table[f"{path}.{kind}.weight"] = rel
        conv = "deberta.encoder.conv"
        for tap in range(config.conv_size):
            table[f"{conv}.taps.{tap}.weight"] = Source(f"{conv}.conv.weight", tap=tap)
        if config.conv_size:
            table[f"{conv}.taps.{config.conv_size // 2}.bias"] = Source(f"{conv}.conv.bias")
        if config.has_head:
            head = "cls.predictions" if config.is_legacy else "lm_predictions.lm_head"
            table[f"{head}.decoder.bias"] = Source(f"{head}.bias")
        return table
