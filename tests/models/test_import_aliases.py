"""Each family is a module of ``penstock.models`` by its model_type, whichever folder its file is in."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import penstock.models
from penstock.models.families import built_in_families
from penstock.models.import_aliases import importable_names
from penstock.models.registry import find_network


@pytest.mark.parametrize("model_type", built_in_families())
def test_a_family_is_importable_by_its_model_type(model_type: str) -> None:
    module = importlib.import_module(f"penstock.models.{model_type}")
    assert getattr(penstock.models, model_type.replace("-", "_")) is module
    network = find_network(model_type)
    assert module.Network is network.Network  # not a copy of the class
    assert module.Config is network.Config
    assert issubclass(module.Network, nn.Module)


def test_both_forms_of_import_give_the_module() -> None:
    import penstock.models.xlm_roberta
    from penstock.models import llama, xlm_roberta
    from penstock.models.llama import Config, Network

    assert (llama.Network, llama.Config) == (Network, Config)
    assert llama.__spec__.name == llama.__name__ == "penstock.models.decoders.llama"
    assert penstock.models.xlm_roberta is xlm_roberta


def test_a_wrong_name_is_an_import_error_with_the_right_one() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("penstock.models.lama")
    with pytest.raises(AttributeError, match="Use llama"):
        _ = penstock.models.lama  # type: ignore[attr-defined]
    assert {"llama", "xlm_roberta", "registry"} <= set(dir(penstock.models))


def test_no_name_is_that_of_a_folder_or_of_another_module() -> None:
    folder = Path(penstock.models.__file__).parent
    assert not {path.stem for path in folder.iterdir()} & importable_names().keys()


def test_importing_the_package_imports_no_network() -> None:
    script = (
        "import sys, penstock.models; assert 'torch' not in sys.modules; dir(penstock.models);"
        "from penstock.models import bert;"
        "print('torch' in sys.modules, 'penstock.models.decoders.llama' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_type_checkers_know_every_name() -> None:
    tree = ast.parse(Path(penstock.models.__file__).with_suffix(".pyi").read_text())
    stated = {
        name.asname or name.name: f"{node.module}.{name.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for name in node.names
    }
    assert stated == {name: module for name, module in importable_names().items() if name.isidentifier()}
    (exported,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert sorted(ast.literal_eval(exported)) == sorted(stated)
