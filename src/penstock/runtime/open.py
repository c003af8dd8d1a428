"""Open a checkpoint folder, a GGUF file or a bundle as a program."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.checkpoint.gguf.file_name import split_names
from penstock.config import check_choice, check_flag, check_integer
from penstock.core.rank_layout import RankLayout
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError, OutOfMemoryError, UnsupportedError
from penstock.file_kinds import is_bundle, is_gguf
from penstock.runtime.machine import memory
from penstock.runtime.program import Program, ProgramInfo, ProgramLimits, pages_for
from penstock.runtime.verify import check_verify
from penstock.sharding.names import is_sharded, rank_bundle
from penstock.validation import refusal, wrong_type

if TYPE_CHECKING:
    from penstock.graph.ir import Graph
    from penstock.runtime.ranks.stage_server import StageServer
    from penstock.sharding.folder import ShardedFolder

__all__ = [
    "MODES",
    "OpenOptions",
    "Opened",
    "bundle_of",
    "check_layout",
    "check_network",
    "is_cut",
    "open_program",
    "opens_whole",
    "rank_bundles",
    "rank_notes",
    "registered_script",
]

MODES = ("graph", "eager")
_LOG = logging.getLogger("penstock.cache")
EAGER_CONTEXT = 4096
"""The default limit on the context length in eager mode, which is for debugging."""


@dataclass
class Opened:
    """An open program, and the files beside its weights by name.

    ``notes`` are lines for the user.  ``bundle`` is the file that runs (None in eager mode).  Times in seconds:
    ``populate_s`` for copying the weights into huge pages, ``verify_s`` for verifying checksums, and ``load_s`` for the
    rest of opening, without building a bundle.
    """

    program: Program
    files: dict[str, bytes]
    source: Path
    notes: list[str]
    bundle: Path | None = None
    load_s: float = 0.0
    populate_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening files.

    ``use_cache``: keep the bundle that is built from a folder for later; without it the bundle lasts as long as the
    program.  ``progress``: called with a ``build.Progress``.  ``verify``: when to verify the checksums of a bundle:
    "once" per file, "always" or "never".  ``tensor_parallel_size``: the number of processes on this host that each
    layer is divided over.  ``pipeline_parallel_size``: the number of stages that the layers are divided into.
    ``stage_server``: where stages join as processes of other machines (``penstock stage``); None starts them here.
    ``context_parallel_size``: the number of processes that each context and each layer are divided over.
    """

    use_cache: bool = True
    progress: Callable[[Any], None] | None = None
    verify: str = "once"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    stage_server: StageServer | None = None

    def __post_init__(self) -> None:
        """Refuse a value of the wrong type, by name."""
        check_flag("use_cache", self.use_cache)
        if self.progress is not None and not callable(self.progress):
            raise wrong_type("progress", "a function", self.progress)
        check_verify(self.verify)
        _ = self.layout
        if self.stage_server is not None and self.context_parallel_size > 1:
            raise UnsupportedError(
                "context_parallel_size: expected 1 with stages on other machines, got "
                f"{self.context_parallel_size}; these divide the layers",
                param="context_parallel_size",
            )

    @property
    def layout(self) -> RankLayout:
        """The division of the network over ranks."""
        return RankLayout(self.tensor_parallel_size, self.pipeline_parallel_size, self.context_parallel_size)


def open_program(
    model: Path | str,
    *,
    scheme: str | None = None,
    mode: str = "graph",
    threads: int = 0,
    limits: ProgramLimits | None = None,
    network: str | None = None,
    options: OpenOptions | None = None,
) -> Opened:
    """Open a ``.psm`` bundle, a checkpoint folder or a GGUF file.

    In graph mode a folder or GGUF file is captured and packed once, in a child process, and the bundle is kept in the
    cache.
    ``scheme``: None keeps the checkpoint's own type.  ``threads``: 0 (the default) uses as many as are allowed.
    ``network``: "file.py:Class".  Raises InvalidArgumentError, UnsupportedError, InvalidFileError, FileAccessError or
    OutOfMemoryError; the message names the alternative.
    """
    from penstock.core.context import MAX_THREADS

    check_choice("mode", mode, MODES)
    check_integer("threads", threads, 0, MAX_THREADS)
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise refusal("model", "the path of a checkpoint folder, a GGUF file or a .psm bundle", model)
    if limits is not None and not isinstance(limits, ProgramLimits):
        raise wrong_type("limits", "ProgramLimits", limits)
    check_network(network)
    path, options = Path(model), options or OpenOptions()
    limits = limits or ProgramLimits()
    if path.is_dir() or (is_gguf(path) and path.exists()):
        if mode == "eager":
            for name in ("pipeline_parallel_size", "context_parallel_size"):
                if getattr(options, name) > 1:
                    raise UnsupportedError(f"{name}: expected 1 in eager mode; use mode graph", param=name)
            if options.stage_server is not None:
                raise UnsupportedError("stage_server: expected none in eager mode", param="stage_server")
            if options.verify == "always":
                raise UnsupportedError(
                    f"verify: expected a bundle, got the checkpoint folder {path}, which has no checksums",
                    param="verify",
                )
            return _open_eager(path, scheme, threads, limits, network, options.tensor_parallel_size)
        if is_cut(path) and not opens_whole(path, options):
            return _open_cut(path, scheme, threads, limits, network, options)
        network = network or registered_script(path)
        return _open_folder(path, scheme, threads, limits, network, options)
    if not path.exists():
        raise FileAccessError(
            f"{path}: no such file or folder{_here(path)}; expected a local checkpoint folder, a .gguf file or a .psm "
            "bundle",
            param="model",
        )
    _check_bundle_options(path, mode, network)
    return _open_bundle(path, scheme, threads, limits, options)


def _here(path: Path) -> str:
    return "" if path.is_absolute() else f" in {os.getcwd()}"


def check_network(network: object) -> None:
    """Raise InvalidArgumentError unless it is None or a string: the export process imports a network from its file."""
    if network is None or isinstance(network, str):
        return
    hint = ""
    if isinstance(network, type):
        hint = f"; to use a class, call penstock.register_network(model_type, {network.__name__})"
    raise InvalidArgumentError(
        f"network: expected a string such as 'file.py:Class', got {network!r:.80}{hint}", param="network"
    )


def registered_script(folder: Path) -> str | None:
    """Return where the export process finds a network that this process registered for the folder's model_type."""
    registry = sys.modules.get("penstock.models.registry")  # without it, nothing was registered
    if registry is None:
        return None
    from penstock.sharding.whole import open_checkpoint

    model_type = open_checkpoint(folder).stored_config.optional_str("model_type")
    script: str | None = None if model_type is None else registry.registered_script(model_type)
    return script


def _check_bundle_options(path: Path, mode: str, network: str | None) -> None:
    if not is_bundle(path) and path.suffix in (".bin", ".safetensors", ".pt", ".pth", ".onnx"):
        hint = f"; make a network's bundle with: penstock export {path} NET.psm" if path.suffix == ".onnx" else ""
        raise UnsupportedError(
            f"{path}: expected a checkpoint folder (config.json, *.safetensors), a GGUF file or a .psm bundle, "
            f"got a {path.suffix} file{hint}",
            param="model",
        )
    if mode == "eager":
        raise UnsupportedError(
            f"{path}: expected a checkpoint folder for eager mode, got a bundle; use mode graph", param="model"
        )
    _check_no_network(network, path)


def _refuse_count(folder: Path, first: Graph, parts: Sequence[Path], layout: RankLayout) -> NoReturn:
    """Raise an error for a folder with more or fewer bundles than the layout has ranks.  ``first``: that of rank 0."""
    from penstock.runtime.ranks.open_ranks import layout_of

    cut_for = layout_of(first)
    if (difference := cut_for.first_difference(layout)) is not None:
        name, expected, actual = difference
        raise InvalidArgumentError(
            f"{name}: expected {expected}, because {folder} is cut for {cut_for}, got {actual}", param=name
        )
    missing = next((part.name for part in parts if not part.exists()), None)
    if missing is not None:
        raise InvalidFileError(f"{folder}: expected {missing}, got no file")
    raise InvalidFileError(f"{folder}: expected {len(parts)} bundles, for {cut_for}, got more")


def _check_no_network(network: str | None, path: Path) -> None:
    """Raise InvalidArgumentError for a network script with a bundle."""
    if network is not None:
        raise InvalidArgumentError(
            f"network: expected none for the bundle {path}, which already contains its graph", param="network"
        )


def _open_bundle(
    path: Path,
    scheme: str | None,
    threads: int,
    limits: ProgramLimits,
    options: OpenOptions,
    parts: Sequence[Path] = (),
) -> Opened:
    """Open a bundle; ``parts`` are those of its ranks if they are cut already."""
    from penstock.checkpoint.side_files import SIDE_FILES
    from penstock.core.tokenizer import TOKENIZER_SEGMENT
    from penstock.runtime.native import NativeProgram

    start = time.perf_counter()
    if options.layout.world == 1 and options.stage_server is None:
        path = parts[0] if parts else path
        try:
            program, model = NativeProgram.open(path, threads=threads, limits=limits, verify=options.verify)
        except (InvalidArgumentError, UnsupportedError) as error:
            if re.search(
                "(found|got) rank ", str(error)
            ):  # the message of a part that is opened without the other ranks
                _check_whole(path)
            raise
    else:
        from penstock.runtime.ranks.open_ranks import open_ranks

        program, model = open_ranks(
            parts or path,
            options.layout,
            threads=threads,
            limits=limits,
            verify=options.verify,
            server=options.stage_server,
        )
    try:
        if scheme is not None and scheme != program.info.scheme:
            from penstock.quant.scheme import find_scheme

            find_scheme(scheme)
            raise InvalidArgumentError(
                f"scheme: expected {program.info.scheme!r}, the scheme of the bundle {path}, got {scheme!r}; "
                f"for another scheme export the checkpoint folder with --scheme {scheme}",
                param="scheme",
            )
        files = {}
        for name in (*SIDE_FILES, TOKENIZER_SEGMENT):
            segment = model.segment(name)
            if segment is not None:
                files[name] = bytes(segment)
    except BaseException:
        program.close()
        raise
    notes = _notes(program, limits, model.info.context_len, is_local=options.stage_server is None)
    load_s = time.perf_counter() - start - program.populate_s - program.verify_s
    return Opened(program, files, path, notes, path, load_s, program.populate_s, program.verify_s)


def _check_whole(path: Path) -> None:
    """Raise InvalidArgumentError if the bundle is that of one rank of several."""
    from penstock.core.metadata import read_metadata
    from penstock.core.native import Model
    from penstock.graph.metadata import decode_metadata
    from penstock.graph.rank_bundle import WHOLE
    from penstock.runtime.ranks.open_ranks import layout_of

    with Model.open(path) as model:
        graph = decode_metadata(read_metadata(path, model.stamp))[0]
    if WHOLE in graph.properties:
        raise InvalidArgumentError(
            f"{path}: expected a whole bundle, got that of one rank (of {layout_of(graph)}); open the folder "
            f"{path.parent} with the bundles of all ranks",
            param="model",
        )


def rank_notes(info: ProgramInfo, *, is_local: bool = True) -> list[str]:
    """Return the notes that follow from the division of a model over ranks; ``is_local``: all ranks are here."""
    notes = []
    num_threads = info.num_ranks * info.num_threads
    if is_local and info.num_ranks > 1:
        from penstock.runtime.ranks.open_ranks import default_threads

        if num_threads > (num_cores := default_threads()):
            notes.append(
                f"The {info.num_ranks} ranks have {num_threads} threads, but only {num_cores} cores. "
                "Set --tp, --pp, --cp or --threads to change it."
            )
    if info.repeated_kv_bytes:
        megabytes = max(0.1, info.repeated_kv_bytes / 1e6)
        notes.append(f"Key-value heads are repeated on ranks, which costs {megabytes:,.1f} MB of keys and values.")
    return notes


def _notes(program: Program, limits: ProgramLimits, longest: int, *, is_local: bool) -> list[str]:
    """Return lines for the user.  ``longest``: the context length of the model.  ``is_local``: all ranks are here."""
    notes = rank_notes(program.info, is_local=is_local)
    if limits.context_len == 0 and program.limits.context_len < longest:
        notes.append(
            f"The context length is {program.limits.context_len} instead of the model's {longest}, because more does "
            "not fit into memory. Set --context-len or --kv-cache to change it."
        )
    if not memory().is_measured:
        notes.append(
            "The free memory is unknown because /proc is not mounted. If the model does not fit, set --context-len."
        )
    return notes


def _open_cut(
    folder: Path,
    scheme: str | None,
    threads: int,
    limits: ProgramLimits,
    network: str | None,
    options: OpenOptions,
) -> Opened:
    """Open a folder that is cut for ranks."""
    is_made = is_sharded(folder)  # under the scheme, and verified
    with rank_bundles(folder, scheme, network, options) as parts:
        opened = _open_bundle(
            folder,
            None if is_made else scheme,
            threads,
            limits,
            replace(options, verify="never") if is_made else options,
            parts,
        )
    opened.source = folder
    return opened


def is_cut(folder: Path) -> bool:
    """Return True if a folder is cut for ranks: it has a part of the weights for each, or a bundle for each."""
    return is_sharded(folder) or (folder / rank_bundle(0)).exists()


def opens_whole(folder: Path, options: OpenOptions) -> bool:
    """Return True for a sharded folder that one process opens: it runs the whole model."""
    return is_sharded(folder) and options.layout.world == 1 and options.stage_server is None


@contextmanager
def rank_bundles(
    folder: Path, scheme: str | None, network: str | None = None, options: OpenOptions | None = None
) -> Iterator[list[Path]]:
    """Yield the bundles of all ranks of a folder that is cut for them.

    Those of a sharded folder are made under ``scheme`` and verified; without the cache they lie in one folder, which is
    deleted after the block.  With stages on other machines only that of rank 0 is yielded, and the folder need not have
    the others.
    """
    from penstock.graph.bundle import read_graph
    from penstock.sharding.folder import ShardedFolder

    options = options or OpenOptions()
    is_local = options.stage_server is None
    world = options.layout.world if is_local else 1
    if not is_sharded(folder):
        _check_no_network(network, folder)
        parts = [folder / rank_bundle(rank) for rank in range(world)]
        count = len(list(folder.glob(rank_bundle("*"))))
        if is_local and count != world:
            _refuse_count(folder, read_graph(folder / rank_bundle(0))[0], parts, options.layout)
        yield parts
        return
    sharded = ShardedFolder.open(folder)
    check_layout(folder, sharded, options.layout)
    for rank in range(world):
        sharded.file(rank)  # a missing one is named before the bundle of another is made
    with ExitStack() as stack:
        if options.use_cache:
            yield [stack.enter_context(bundle_of(folder, scheme, network, options, rank=rank)) for rank in range(world)]
            return
        from penstock.runtime.build import build_in_child
        from penstock.runtime.temporary_folder import temporary_folder

        temporary = Path(stack.enter_context(temporary_folder(folder)))
        parts = [temporary / rank_bundle(rank) for rank in range(world)]
        for rank, part in enumerate(parts):
            build_in_child(
                folder, part, scheme=scheme, network=network, rank=rank, kind="cached", progress=options.progress
            )
        yield parts


def check_layout(folder: Path, sharded: ShardedFolder, layout: RankLayout) -> None:
    """Raise InvalidArgumentError, which names the option, unless a sharded folder is cut for the layout."""
    difference = sharded.strategy.layout.first_difference(layout)
    if difference is not None:
        name, expected, actual = difference
        raise InvalidArgumentError(
            f"{name}: expected {expected}, because {folder} is cut for {sharded.strategy.layout}, got {actual}",
            param=name,
        )


def _open_folder(
    folder: Path,
    scheme: str | None,
    threads: int,
    limits: ProgramLimits,
    network: str | None,
    options: OpenOptions,
) -> Opened:
    try:
        with bundle_of(folder, scheme, network, options) as bundle:
            verified = replace(options, verify="never")
            opened = _open_bundle(bundle, None, threads, limits, verified)
        if not bundle.exists():
            opened.bundle = None
    except OutOfMemoryError as error:
        hint = "" if scheme is not None else "; --scheme w8a8 or w4a8 makes the weights smaller"
        raise OutOfMemoryError(f"{error}{hint}") from None
    if scheme is None:
        opened.notes += _suggestion(opened.program, folder)
    opened.source = folder
    return opened


@contextmanager
def bundle_of(
    folder: Path,
    scheme: str | None,
    network: str | None = None,
    options: OpenOptions | None = None,
    rank: int | None = None,
) -> Iterator[Path]:
    """Yield the verified bundle of a checkpoint folder: from the cache, or else one that is deleted after the block.

    ``rank``: of a sharded folder.  If the cache cannot be written, it is not used, with a warning.

    A deleted file stays readable while it is open, so nothing is left behind however the process ends.
    """
    options = options or OpenOptions()
    if options.use_cache:
        from penstock.runtime.cache import Cache, CacheNotWritableError

        try:
            cached = Cache().find_or_build(folder, scheme, network, options.progress, options.verify, rank)
        except CacheNotWritableError as error:
            _LOG.warning("penstock: %s The bundle is made for this run only.", error)
        else:
            yield cached
            return
    from penstock.runtime.build import build_in_child
    from penstock.runtime.temporary_folder import temporary_folder

    with temporary_folder(folder) as temporary:
        bundle = Path(temporary) / "model.psm"
        build_in_child(
            folder, bundle, scheme=scheme, network=network, rank=rank, kind="cached", progress=options.progress
        )
        yield bundle  # needs no verification: its checksums were just computed


def _suggestion(program: Program, source: Path) -> list[str]:
    """Return a note for a program in the checkpoint's own type, when eight bits would read far fewer bytes."""
    stored = program.info.scheme
    if stored not in ("f32", "f16", "bf16"):
        return []
    if stored == "f32" and is_gguf(source):
        parts = [part for name in split_names(source.name) if (part := source.with_name(name)).exists()]
        growth = program.info.weight_bytes / max(1, sum(part.stat().st_size for part in parts))
        if growth > 1.5:  # the GGUF file is quantized
            return [
                f"The scheme is f32, which holds the exact values of {source.name} in about {growth:.0f} times its "
                "memory. --scheme w8a8 or w4a8 quantizes them again, reads fewer bytes per token and is faster."
            ]
    times = 4 if stored == "f32" else 2
    return [
        f"The scheme is {stored}, as stored. --scheme w8a8 reads about {times}x fewer bytes per token and is faster."
    ]


def _open_eager(
    folder: Path, scheme: str | None, threads: int, limits: ProgramLimits, network: str | None, num_ranks: int
) -> Opened:
    from penstock.checkpoint.folder import Checkpoint
    from penstock.checkpoint.generation import read_generation_config, read_tokenizer_config
    from penstock.runtime.stored_kv import stored_kv_layout

    if limits.weights != "mmap":
        raise UnsupportedError(
            f"weights: expected mmap in eager mode, which keeps weights in PyTorch's memory, got {limits.weights!r}",
            param="weights",
        )
    checkpoint = Checkpoint.open(folder)
    files = checkpoint.side_files()
    read_generation_config(files)  # small files first: a mistake in one is reported before the work begins
    read_tokenizer_config(files)
    context_len = limits.context_len or EAGER_CONTEXT
    longest = checkpoint.config.optional_int("max_position_embeddings")
    if longest is not None:  # a user's network may have another key for it; the program then reads its config
        context_len = min(context_len, longest)
    kv_layout = stored_kv_layout(files["config.json"]) or "auto"
    eager_limits = ProgramLimits(
        max_tokens=limits.max_tokens,
        max_requests=limits.max_requests,
        max_rows=limits.max_rows,
        num_pages=limits.num_pages or pages_for(context_len) * min(limits.max_requests, 4),
        context_len=context_len,
        kv_layout=kv_layout if limits.kv_layout == "auto" else limits.kv_layout,
    )
    try:
        from penstock.runtime.eager import EagerProgram
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from penstock.extras import install_command

        raise UnsupportedError(
            f"Eager mode requires PyTorch, which is not installed. Run `{install_command('torch')}`.", param="mode"
        ) from error
    program = EagerProgram(
        checkpoint, scheme=scheme, threads=threads, limits=eager_limits, network=network, num_ranks=num_ranks
    )
    return Opened(program, files, folder, [])
