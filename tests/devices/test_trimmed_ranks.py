"""A build for the bundle of a rank has ranks, and the kernels of their ops, whichever of them the bundle has."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.ops.table import OPS
from tests.support.builds import ROOT, tool

CORE = ROOT / "core"
KERNELS = {  # what the ops call that have no kernel of their own name
    "context_attention": ("attention", "attention_part", "attention_merge"),
    "sharded_embedding": ("embedding",),
}
TABLE = """
#define PENSTOCK_GENERIC
#include "base/kernels.h"
#include "penstock_dev.h"
#include "simd/generic.h"
#include "levels/table.h"
"""


def builds(folder: Path, ops: tuple[str, ...], fact: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Compile ``static_assert(fact)`` as a build with only these ops does; ``more`` are about the table of kernels."""
    listed = f'#define PS_BUILD_OPS " {" ".join(ops)} "\n#define PS_BUILD_SCHEMES " f32 "\n'
    (folder / "ops_from.h").write_text(
        f"{listed}#define PS_BUILD_LAYOUTS 0x10001u\n#define PS_BUILD_KV_LAYOUTS 2u\n#define PS_BUILD_NETWORKS false\n"
    )
    asserts = "".join(f'static_assert({text}, "{text}");\n' for text in (fact, *more))
    source = f'#include "ops/ops.h"\n{TABLE if more else ""}namespace ps {{\n{asserts}}}\n'
    (folder / "source.cpp").write_text(source)
    includes = [f"-I{path}" for path in (folder, CORE / "include", CORE / "src", CORE / "kernels")]
    words = (tool("c++"), "-std=c++20", "-fsyntax-only", "-DPENSTOCK_OPS_FROM", *includes, folder / "source.cpp")
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)


def test_a_build_for_any_op_of_ranks_has_ranks(tmp_path: Path) -> None:
    names = [op.name for op in OPS if "int rank" in op.schema]
    assert {"all_gather", "all_gather_rounded", "context_attention"} <= set(names)
    for name in names:
        facts = [f"table.{kernel} != nullptr" for kernel in KERNELS.get(name, ())]
        done = builds(tmp_path, (name,), "kBuildsRanks", *facts)
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    done = builds(tmp_path, ("linear", "attention"), "!kBuildsRanks")
    assert done.returncode == 0, done.stderr[-2000:]
