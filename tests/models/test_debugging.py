"""Eager mode is for debugging: a breakpoint in a layer shows named tensors in their logical shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.families import save

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import numpy as np
from penstock.core.native import StepBatch
from penstock.runtime.eager import EagerProgram
from penstock.runtime.program import ProgramLimits

program = EagerProgram(sys.argv[1], scheme="w4a8", threads=1, limits=ProgramLimits(64, 2, 2, 4, 256))
def int32(*values):
    return np.array(values, np.int32)
program.run(StepBatch(int32(7, 8, 9), int32(0, 1, 2), int32(0, 3), int32(0).reshape(1, 1, 1), int32(2)))
print("logits", program.logits().shape)
"""
COMMANDS = """
import penstock.models.decoders.llama
break penstock.models.decoders.llama.LlamaAttention.forward
continue
p x.shape, batch.positions.tolist()
p self.q_proj
p self.q_proj.weight.shape, self.q_proj.weight.dtype
p bool((self.q_proj.weight[0] - original[0]).abs().max() < 0.05)
next
p q.shape
p (q.flatten(1) - x @ self.q_proj.weight.T).abs().max() < 0.1 * q.abs().max()
p self.attention
p list(dict(self.named_parameters())), [n for n, _ in self.named_modules()]
clear
continue
"""


def test_pdb_shows_named_tensors_in_logical_shapes(tmp_path: Path) -> None:
    folder = save("llama_tied_one_kv_head", tmp_path / "model")
    script = tmp_path / "debug.py"
    script.write_text(SCRIPT)
    read = "from safetensors.torch import load_file; "
    read += f"original = load_file({str(folder / 'model.safetensors')!r})['model.layers.0.self_attn.q_proj.weight']"
    commands = COMMANDS.replace("p bool(", f"!{read}\np bool(").replace("clear\n", "clear\ny\n")
    done = subprocess.run(
        [sys.executable, "-m", "pdb", str(script), str(folder)],
        input=commands,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=ROOT,
    )
    shown = done.stdout
    assert "(torch.Size([3, 160]), [0, 1, 2])" in shown, shown + done.stderr
    assert "Linear(weight=[160, 160], scheme=w4a8, bias=False)" in shown
    assert "(torch.Size([160, 160]), torch.float32)" in shown
    assert "torch.Size([3, 5, 32])" in shown
    assert "num_heads=5, num_kv_heads=1, head_dim=32" in shown
    assert "'q_proj', 'k_proj', 'v_proj', 'o_proj'" in shown
    assert shown.count("True") >= 2, shown
    assert "logits (1, 1003)" in shown
