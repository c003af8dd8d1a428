"""The architecture: imports point downwards, PyTorch stays where it belongs, files and folders stay small."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from penstock.checkpoint.gguf.architectures.table import architecture_of
from penstock.models.families import family_modules

PACKAGE = Path(__file__).parents[2] / "src" / "penstock"
LAYERS = (
    "cli",
    "serving",
    "servables",
    "bench",
    "calibration",
    "cluster",
    "offline",
    "lite",
    "llm",
    "engine",
    "text",
    "hub",
    "networks",
    "runtime",
    "graph",
    "models",
    "sharding",
    "checkpoint",
    "nn",
    "quant",
    "ops",
    "symbolic",
    "core",
    "launch",
    "processes",
)  # top to bottom
LEAVES = (
    "api_errors",
    "config",
    "env",
    "errors",
    "extras",
    "file_kinds",
    "logs",
    "sampling_fields",
    "tensors",
    "validation",
    "version",
)
CLIENT_IMPORTS = ("penstock.client", "penstock.errors", "penstock.tensors", "penstock.serving.proto")
FACADE = ("__init__", "auto", "servable")  # the public surface: above every layer but the command line, imports lazily
TORCH_ALLOWED = (
    "models/loader.py",
    "nn/base.py",
    "nn/packing.py",
    "nn/ranks.py",
    "quant/round_to_nearest.py",
    "ops/reference/",
    "ops/eager.py",
    "ops/custom.py",
    "graph/capture.py",
    "graph/general/torch/",
    "networks/network.py",
    "runtime/eager.py",
)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_CONFIG_FIELDS = 36
MAX_FOLDER_FILES = 20
BANNED_NAMES = ("utils", "common", "manager", "handler", "helpers", "misc", "mixin")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """A million nodes stay in memory, and half of the time would be spent looking at them for garbage."""
    gc.disable()
    yield
    gc.enable()


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every absolute module name that the file imports, inside functions too."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            module = node.module or ""
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def floor_of(module: str) -> int | None:
    """0 for the top layer; None for leaves and for what is not ours."""
    parts = module.split(".")
    if parts[0] != "penstock" or len(parts) < 2 or parts[1] in LEAVES:
        return None
    return LAYERS.index(parts[1]) if parts[1] in LAYERS else None


def refuse_upward_imports(path: Path) -> None:
    relative = name_of(path)
    own = relative.split("/")[0].removesuffix(".py")
    if own in FACADE:
        forbidden = [f"{line}: {name}" for line, name in imports_of(path) if name.startswith("penstock.cli.")]
        assert not forbidden, f"{relative} reaches up: {forbidden}"
        return
    if own == "__main__":
        return
    if own == "client":
        foreign = [name for _, name in imports_of(path) if name.split(".")[0] == "penstock"]
        assert all(name.startswith(CLIENT_IMPORTS) for name in foreign), f"{relative} imports {foreign}"
        return
    floor = len(LAYERS) if own in LEAVES else LAYERS.index(own)
    upward = [
        f"{line}: {name}"
        for line, name in imports_of(path)
        if (other := floor_of(name)) is not None and other < floor
    ]  # fmt: skip
    assert not upward, f"{relative} reaches up: {upward}"


# One test for all modules: a parameter for each would make a quarter of the suite's tests.
def test_imports_point_downwards() -> None:
    for path in modules():
        refuse_upward_imports(path)


def test_only_the_torch_layers_import_torch() -> None:
    for path in modules():
        relative = name_of(path)
        lines = [line for line, name in imports_of(path) if name == "torch" or name.startswith("torch.")]
        allowed = relative.startswith(TORCH_ALLOWED) and relative != "checkpoint/folder.py"
        assert allowed or not lines, f"{relative} imports torch in lines {lines}"


def test_scheduler_and_pages_know_no_tensors() -> None:
    for name in ("scheduler", "pages"):
        for line, imported in imports_of(PACKAGE / "engine" / f"{name}.py"):
            assert not imported.startswith(("numpy", "torch")), f"engine/{name}.py:{line} imports {imported}"


def test_everything_else_runs_with_torch_blocked() -> None:
    """Import every module outside the torch layers in a process where ``import torch`` fails."""
    names = [
        "penstock." + name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in modules()
        if not name_of(path).startswith(TORCH_ALLOWED) and path.name != "__main__.py"
    ]
    names += ["penstock.checkpoint.folder"]
    script = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        f"for name in {[name for name in names if name != 'penstock.__init__']!r}:\n"
        "    importlib.import_module(name)\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def refuse_long_parts(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{name_of(path)} has {text.count(chr(10))} lines"
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name_of(path)}: {node.name} has {lines} lines"
            arguments = node.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
            own = 1 if arguments.args and arguments.args[0].arg in ("self", "cls") else 0
            # A reference has the arguments of its op's schema, and a reader those of PyTorch's op.
            if not name_of(path).startswith(("ops/reference/", "graph/general/torch/")):
                assert count - own <= MAX_PARAMETERS, f"{name_of(path)}: {node.name} has {count - own} parameters"


def test_files_and_functions_stay_short() -> None:
    for path in modules():
        refuse_long_parts(path)


def test_native_files_stay_short() -> None:
    core = PACKAGE.parents[1] / "core"
    for path in sorted([*core.rglob("*.cpp"), *core.rglob("*.h")]):
        text = path.read_text()
        lines = 0 if text.startswith("// Generated by ") else text.count("\n")
        assert lines <= MAX_FILE_LINES, f"{path.name} has {lines} lines"


def test_no_checks_by_assert_and_no_unsafe_loading() -> None:
    for path in modules():
        for node in nodes_of(path):
            assert not isinstance(node, ast.Assert), f"{name_of(path)}:{node.lineno} checks by assert"
        for line, name in imports_of(path):
            assert name.split(".")[0] not in ("pickle", "marshal", "shelve", "dill"), f"{name_of(path)}:{line}"


def test_folders_stay_small_and_say_what_they_may_know() -> None:
    for folder in sorted({path.parent for path in modules()}):
        relative = folder.relative_to(PACKAGE).as_posix()
        files = [path for path in folder.glob("*.py") if not path.name.endswith(("_pb2.py", "__init__.py"))]
        # A folder of families has one file per family.
        assert len(files) <= MAX_FOLDER_FILES or relative.startswith("models/"), f"{relative} has {len(files)} files"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{relative} has no docstring"


def test_families_are_named_in_tables_only() -> None:
    """In what reads GGUF files and estimates memory, no condition compares with the name of a family."""
    names = {*family_modules(), *(found[0] for name in family_modules() if (found := architecture_of(name)))}
    for path in (PACKAGE / "checkpoint" / "gguf" / "network.py", PACKAGE / "hub" / "memory_need.py"):
        compared = [node for node in nodes_of(path) if isinstance(node, ast.Compare)]
        texts = {leaf.value for node in compared for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
        assert not texts & names, f"{name_of(path)}: {texts & names}"


def test_no_landfill_names() -> None:
    for path in modules():
        parts = name_of(path).removesuffix(".py").split("/")
        assert not set(parts) & set(BANNED_NAMES), name_of(path)


def test_no_model_names_outside_models() -> None:
    for path in modules():
        if name_of(path).startswith("models/"):
            continue
        names = [n.id for n in nodes_of(path) if isinstance(n, ast.Name)]
        assert not {n for n in names if n.lower().startswith(("llama", "qwen", "mistral"))}, name_of(path)


def test_classes_have_few_fields() -> None:
    for path in modules():
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(line, ast.AnnAssign) for line in node.body)
                assert count <= MAX_CONFIG_FIELDS, f"{name_of(path)}: {node.name} has {count} fields"


CORE = Path(__file__).parents[2] / "core"
CORE_LAYERS = {  # each folder of core/src to those that it may include beside itself
    "base": (),
    "threads": ("base",),
    "comm": ("base", "threads"),
    "ops": ("base", "threads"),
    "experts": ("base", "threads", "ops"),
    "arrays": ("base", "threads", "ops"),
    "general": ("base", "threads", "ops", "arrays"),
    "pack": ("base", "threads", "ops"),
    "paged": ("base", "threads", "ops"),
    "exchange": ("base", "threads", "ops", "paged"),
    "bundle": ("base", "threads", "ops"),
    "sampling": ("base", "threads", "ops"),
    "passes": ("base", "ops", "bundle"),
    "program": ("base", "threads", "ops", "exchange", "bundle", "passes", "sampling"),
    "network": ("base", "threads", "ops", "bundle", "program"),
    "tokenizer": ("base",),
    "api": (
        "base",
        "threads",
        "comm",
        "ops",
        "pack",
        "exchange",
        "bundle",
        "passes",
        "sampling",
        "program",
        "network",
        "tokenizer",
    ),
}
MAX_CORE_FOLDER_FILES = 20
CORE_GENERATED = ("unicode_tables.h",)


def test_core_folders_stay_small() -> None:
    for folder in (CORE, *(path for path in CORE.rglob("*") if path.is_dir())):
        files = [path for path in folder.iterdir() if path.suffix in (".c", ".cpp", ".h", ".py")]
        count = sum(path.name not in CORE_GENERATED for path in files)
        assert count <= MAX_CORE_FOLDER_FILES, f"{folder.relative_to(CORE.parent)} has {count} files"


def test_core_includes_point_downwards() -> None:
    assert {path.name for path in (CORE / "src").iterdir()} == set(CORE_LAYERS)
    for path in sorted((CORE / "src").rglob("*.*")):
        own = path.relative_to(CORE / "src").parts[0]
        for line in path.read_text().splitlines():
            if not line.startswith('#include "'):
                continue
            included = line.split('"')[1]
            if included.startswith("penstock") or included == "ops_from.h":
                continue  # the C headers, and the header that PENSTOCK_OPS_FROM writes
            below = included.split("/")[0]
            assert below == own or below in CORE_LAYERS[own], f"{path.relative_to(CORE)} includes {included}"


FOREIGN_PRIVATE = (  # names of the standard library and of PyTorch that have no public form
    "_Hash", "_exit", "_SubParsersAction", "_ActionsContainer", "_ArgumentGroup", "_replace", "_asdict", "_fields_",
    "_ops", "_opname", "_dynamo", "_parameters", "_buffers", "_C", "_AutoDispatchBelowAutograd",
)  # fmt: skip


def module_of(path: Path) -> str:
    """The module's name below ``penstock``; "" is the package itself."""
    return name_of(path).removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")


def import_graph() -> dict[str, set[str]]:
    """Each module and those it imports, inside functions and TYPE_CHECKING blocks too."""
    names = {module_of(path) for path in modules()}
    graph: dict[str, set[str]] = {}
    for path in modules():
        imported = {name.removeprefix("penstock.") for _, name in imports_of(path) if name.startswith("penstock.")}
        graph[module_of(path)] = {name if name in names else name.rpartition(".")[0] for name in imported}
    return graph


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """The modules that ``start`` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def test_modules_import_without_cycles() -> None:
    graph = import_graph()
    below = {module: reachable(graph, module) for module in graph}
    cycles = {frozenset(other for other in below[m] if m in below[other]) for m in graph if m in below[m]}
    assert not cycles, f"import cycles: {[sorted(cycle) for cycle in cycles]}"


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def private_reads(path: Path) -> set[str]:
    """The ``_private`` names that a file reads from other modules."""
    nodes = nodes_of(path)
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_of_self(node)}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found = {node.attr for node in attributes if not is_of_self(node)} - own
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - set(FOREIGN_PRIVATE)


def test_modules_read_no_private_names_of_others() -> None:
    files = [path for path in modules() if not path.name.endswith("_pb2.py")]
    found = {(name_of(path), name) for path in files for name in private_reads(path)}
    assert not found, f"private names of other modules: {sorted(found)}"


def test_servables_are_layers() -> None:
    """The sub-packages of servables have an order, and each imports only those before it."""
    order = ("api", "process", "schedule", "lifecycle", "machines")
    for path in sorted((PACKAGE / "servables").rglob("*.py")):
        own = path.parent.name
        if own not in order:
            continue
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["penstock", "servables"] and parts[2] in order:
                assert order.index(parts[2]) <= order.index(own), f"{name_of(path)}:{line} imports {name}"
