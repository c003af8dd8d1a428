"""penstock-lite: the tokens that Python's graph mode makes, and a command that behaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from penstock.core.native import Model
from penstock.graph.export import export_bundle
from penstock.graph.ir import Graph
from penstock.runtime.program import ProgramLimits
from tests.support.families import save
from tests.support.tiny_graph import CONTEXT_LEN, stateless_graph, tiny_graph, write_bundle

pytestmark = pytest.mark.long

DEMO = Path(__file__).parents[2] / "demo" / "demo.psm"
PROMPT = "def read(path):\n    "
LONG = "# é ç ✓ \U0001f40d\n" * 10 + "def add(a, b):\n" * 90  # more than one step takes

Command = Callable[..., str]


def failure(lite: Path, *words: object, status: int = 1) -> str:
    done = subprocess.run(
        [lite, *map(str, words)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == status, done
    assert done.stderr.startswith("penstock-lite: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
    return done.stderr


@pytest.mark.parametrize("scheme", ["f32", "w8a8", "w4a8"])
def test_tokens_and_text_are_graph_modes(scheme: str, bundles: dict[str, Path], lite: Path, command: Command) -> None:
    with LLM(bundles[scheme]) as llm:
        for prompt, options, params in (
            (PROMPT, ("--temperature", 0), SamplingParams(temperature=0, max_tokens=48)),
            (LONG, ("--temperature", 0), SamplingParams(temperature=0, max_tokens=48)),
            (PROMPT, ("--temperature", 0.9, "--seed", 7), SamplingParams(temperature=0.9, seed=7, max_tokens=48)),
            (
                PROMPT,
                ("--top-k", 20, "--top-p=0.8", "--threads", 1),
                SamplingParams(top_k=20, top_p=0.8, seed=2**63 - 1, max_tokens=48),
            ),
        ):  # fmt: skip
            wanted = llm.generate(prompt, params)
            seed = ("--seed", params.seed) if params.seed is not None else ()
            found = json.loads(command(lite, bundles[scheme], prompt, "--json", "--max-tokens", 48, *options, *seed))
            assert found["token_ids"] == list(wanted.token_ids)
            assert found["text"] == wanted.text
            assert found["finish_reason"] == wanted.finish_reason
            assert found["num_prompt_tokens"] == len(wanted.prompt_token_ids)
            assert found["scheme"] == scheme


def test_text_streams_to_standard_output(lite: Path, command: Command) -> None:
    found = json.loads(command(lite, DEMO, PROMPT, "--json", "--temperature", 0))
    assert command(lite, DEMO, PROMPT, "--temperature", 0) == found["text"] + "\n"
    assert command(lite, DEMO, "-", "--temperature", 0, input=PROMPT) == found["text"] + "\n"
    assert command(lite, "--temperature=0", "--", DEMO, PROMPT) == found["text"] + "\n"


def test_token_ids_in_and_out(tmp_path: Path, lite: Path, command: Command) -> None:
    """Of a bundle without a tokenizer, too."""
    path = write_bundle(tmp_path / "tiny.psm", tiny_graph())
    assert "segment tokenizer.bin" in (message := failure(lite, path, "text"))
    assert "--ids" in message
    with LLM(path) as llm:
        wanted = list(llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=9)).token_ids)
    assert command(lite, path, "1,2, 3", "--ids", "--max-tokens", 9).split() == [str(token) for token in wanted]
    found = json.loads(command(lite, path, "[1, 2, 3]", "--ids", "--max-tokens", 9, "--json"))
    assert (found["token_ids"], found["text"]) == (wanted, None)
    for prompt in ("1 2 3", " [1,2 3 ]\n", "1,2\t3"):
        found = json.loads(command(lite, path, prompt, "--ids", "--max-tokens", 9, "--json"))
        assert found["token_ids"] == wanted
    for prompt, text in (
        ("1 x", 'expected token ids, as 1,2,3 or 1 2 3 or [1, 2, 3], got "x"'),
        ("1,2,,[3", 'got ",[3"'),
        ("1 [2]", 'got "[2]"'),
        ("1,", 'got ""'),
        (",1", 'got ",1"'),
        ("1 -1", 'got "-1"'),
        ("[1, 2", "expected a ] at the end of the list, got none"),
        ("1]", 'expected nothing behind the ids, got "]"'),
        ("[1] 2", 'expected nothing behind the ids, got "2"'),
        ("[ ]", "PROMPT: expected one token at least, got none"),
    ):
        assert text in failure(lite, path, prompt, "--ids", status=2)
    everything = json.loads(command(lite, path, "1, 2, 3", "--ids", "--max-tokens", 99999, "--ignore-eos", "--json"))
    assert (len(everything["token_ids"]), everything["finish_reason"]) == (CONTEXT_LEN - 3, "length")
    assert "below the vocabulary of 101, got 101" in failure(lite, path, "101", "--ids", status=2)


def test_guesses_are_refused_where_a_state_cannot_go_back(tmp_path: Path, lite: Path, command: Command) -> None:
    save("granitemoehybrid", tmp_path / "model")
    path = tmp_path / "hybrid.psm"
    export_bundle(tmp_path / "model", path)
    words = (path, "[5, 6, 7, 5, 6]", "--ids", "--json", "--max-tokens", 6, "--temperature", 0)
    message = failure(lite, *words, "--prompt-lookup", 3)
    assert "--prompt-lookup: expected 0, got 3: the network has layers with a recurrent state" in message
    assert len(json.loads(command(lite, *words, "--prompt-lookup", 0))["token_ids"]) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-k", "many"], '--top-k: expected a whole number from 0 to 2147483647, got "many"'),
        (["--top-p", "0"], '--top-p: expected a number above 0 and up to 1, got "0"'),
        (["--temperature", "-1"], '--temperature: expected a number from 0 to 100, got "-1"'),
        (["--temperature", "nan"], "--temperature: expected"),
        (["--max-tokens", "0"], '--max-tokens: expected a whole number from 1 to 2147483647, got "0"'),
        (["--max-tokens", "99999999999"], "--max-tokens: expected a whole number from 1 to 2147483647, got"),
        (["--max-tokens"], "--max-tokens: expected a whole number from 1 to 2147483647, got nothing"),
        (["--json=1"], '--json: expected no value, got "1"'),
        (["--help="], '--help: expected no value, got ""'),
        (["--seed", "-1"], "--seed: expected a whole number"),
        (["--threads", "1025"], "--threads: expected"),
        (["--kv-cache", "f64"], '--kv-cache: expected auto, f32, bf16, int8 or int4, got "f64"'),
        (["--stop", ""], '--stop: expected a text, got ""'),
        (["--stop", "a", "--ids"], '--stop: expected an answer in text, got "--ids"'),
        (["--prompt-lookup", "16"], '--prompt-lookup: expected a whole number from 0 to 15, got "16"'),
        (["--weights", "file"], '--weights: expected mmap or huge, got "file"'),
        (["--colour=1"], 'options: expected those of --help, got "--colour"'),
        (["--colour"], 'options: expected those of --help, got "--colour"'),
        (["third"], 'PROMPT: expected one text (put it in quotes), got "third"'),
    ],
)
def test_wrong_options_are_refused_by_name(words: list[str], message: str, lite: Path) -> None:
    assert message in failure(lite, DEMO, "x", *words, status=2)


def test_wrong_bundles_and_prompts_are_refused(tmp_path: Path, lite: Path) -> None:
    assert "BUNDLE: expected" in failure(lite, status=2)
    assert "PROMPT: expected" in failure(lite, DEMO, status=2)
    assert "No such file" in failure(lite, tmp_path / "none.psm", "x")
    (tmp_path / "cut.psm").write_bytes(DEMO.read_bytes()[:5000])
    assert "cut.psm: header.file_bytes" in failure(lite, tmp_path / "cut.psm", "x")
    assert "the context holds 1024" in failure(lite, DEMO, "word " * 1100, status=2)
    assert "one token at least" in failure(lite, DEMO, "", status=2)
    assert "--ops: " in failure(lite, DEMO, "x", "--ops", tmp_path / "none.so", status=2)
    done = subprocess.run([lite, DEMO, b"\xff\xfe"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"UTF-8" in done.stderr


def test_error_quotes_only_the_wrong_input(tmp_path: Path, lite: Path) -> None:
    path = write_bundle(tmp_path / "tiny.psm", tiny_graph())
    full = {"MALLOC_PERTURB_": "190", "GLIBC_TUNABLES": "glibc.malloc.perturb=190"}  # memory is not zero by itself
    words = [lite, path, "-", "--ids"]
    done = subprocess.run(words, input="x", capture_output=True, text=True, check=False, env={**os.environ, **full})
    assert done.stderr.startswith("penstock-lite: --ids: PROMPT: expected token ids, ")
    assert done.stderr.endswith(' or [1, 2, 3], got "x"\n')


def test_stateless_graph_runs(tmp_path: Path, lite: Path, command: Command) -> None:
    path = write_bundle(tmp_path / "stateless.psm", stateless_graph())
    with LLM(path) as llm:
        wanted = list(llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=9)).token_ids)
    assert command(lite, path, "1 2 3", "--ids", "--max-tokens", 9).split() == [str(token) for token in wanted]


def test_standard_input_is_bounded(tmp_path: Path, lite: Path, command: Command) -> None:
    """It ends where the bound is passed, though the pipe stays open."""
    path = write_bundle(tmp_path / "tiny.psm", tiny_graph())
    bound = 256 * CONTEXT_LEN
    text = "1 2 3".ljust(bound)
    assert command(lite, path, "-", "--ids", "--max-tokens", 2, input=text).split()
    words = [lite, path, "-", "--ids"]
    with subprocess.Popen(words, stdin=-1, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(text + " ")
        process.stdin.flush()
        assert process.wait(60) == 2
        message = process.stderr.read()
    assert f"PROMPT: expected at most {bound} bytes on standard input" in message


def test_verify_names_the_damaged_segment(tmp_path: Path, lite: Path, command: Command) -> None:
    words = (PROMPT, "--temperature", 0, "--max-tokens", 4)
    wanted = command(lite, DEMO, *words)
    assert command(lite, DEMO, *words, "--verify") == wanted
    with Model.open(DEMO) as model:
        at = DEMO.read_bytes().index(bytes(model.segment("weights") or b"")[:4096])
    data = bytearray(DEMO.read_bytes())
    data[at + 200_000] ^= 1
    path = tmp_path / "damaged.psm"
    path.write_bytes(data)
    assert command(lite, path, *words)  # unless asked for, weights are not read twice
    for how in ("mmap", "huge"):
        message = failure(lite, path, *words, "--verify", "--weights", how)
        assert "damaged.psm: segments[0] (weights).crc32: expected 0x" in message
        assert "the file is damaged" in message


def test_contexts_are_refused_by_the_field(lite: Path) -> None:
    env = {**os.environ, "PENSTOCK_CPU": "abacus"}
    done = subprocess.run([lite, DEMO, "x"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.startswith("penstock-lite: PENSTOCK_CPU: expected one of ")


def test_any_scheme_is_json(tmp_path: Path, lite: Path, command: Command) -> None:
    name = 'a"b\\'

    def rename(graph: Graph) -> None:
        graph.scheme = name

    path = write_bundle(tmp_path / "tiny.psm", tiny_graph(), patch=rename)
    assert json.loads(command(lite, path, "1", "--ids", "--max-tokens", 2, "--json"))["scheme"] == name


def test_text_never_drives_the_terminal(lite: Path) -> None:
    """C0, DEL and C1 controls, of the prompt that a terminal shows as of the answer."""
    leader, follower = os.openpty()
    with os.fdopen(follower, "wb") as terminal:
        words = [lite, DEMO, "a\x1b[2Jb\x7f\u0080\u009b2J\u009f\u00a0é\n", "--max-tokens", "1", "--temperature", "0"]
        done = subprocess.run(words, stdout=terminal, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 0, done.stderr
        shown = b""
        while shown.count(b"\n") < 2:  # the prompt's and the end's
            shown += os.read(leader, 1000)
    os.close(leader)
    assert shown.decode().startswith("a\ufffd[2Jb\ufffd\ufffd\ufffd2J\ufffd\u00a0é\r\n")


def test_version_and_help(lite: Path, command: Command) -> None:
    from penstock import __version__

    assert command(lite, "--version").startswith(f"penstock-lite {__version__} ")
    text = command(lite, "--help")
    options = "max-tokens temperature top-k top-p seed stop prompt-lookup threads weights verify bench json ids version"
    for option in options.split():
        assert f"--{option} " in text


def test_bench_prints_speed_and_memory(lite: Path) -> None:
    words = [lite, DEMO, PROMPT, "--bench", "--json", "--max-tokens", "32", "--temperature", "0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert len(found["token_ids"]) == 32  # past end tokens
    assert all(value > 0 for value in found["timings"].values())
    memory = found["memory"]
    assert 0 < memory["private_dirty_bytes"] < memory["plan_bytes"]
    assert "prefill" in done.stderr
    assert "PSS" in done.stderr


def test_memory_without_proc(lite: Path) -> None:
    """No figure is 0 because it is unknown."""
    script = 'mount -t tmpfs none /proc && exec "$@"'
    words = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of its own")
    words += [lite, DEMO, PROMPT, "--bench", "--max-tokens", "8"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "memory 0.0 MB" not in done.stderr
    assert "peak RSS 0.00 MB" not in done.stderr
    assert done.stderr.endswith("PSS unknown because /proc is not mounted\n")


def test_a_closed_pipe_ends_it_quietly(lite: Path) -> None:
    with subprocess.Popen([lite, DEMO, PROMPT, "--ignore-eos", "--max-tokens", "900"], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [[DEMO, PROMPT], [DEMO, PROMPT, "--json"], ["--help"], ["--version"]])
def test_full_disk_is_an_error(words: list[str | Path], lite: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([lite, *words], stdout=full, stderr=-1, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "penstock-lite: standard output: No space left on device\n"


def test_interrupt_ends_it_with_130(lite: Path) -> None:
    with subprocess.Popen([lite, DEMO, PROMPT, "--ignore-eos", "--max-tokens", "900"], stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
        assert process.stderr.read() == b"\n"


def mapped(pid: int, path: Path) -> tuple[int, int]:
    """Kilobytes of the file that a process has in memory, and its share of them."""
    rss = pss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            inside = words[-1] == str(path)
        elif inside and words[0] == "Rss:":
            rss += int(words[1])
        elif inside and words[0] == "Pss:":
            pss += int(words[1])
    return rss, pss


def test_two_processes_share_the_pages_of_a_bundle(tmp_path: Path, lite: Path) -> None:
    path = Path(shutil.copy(DEMO, tmp_path))
    words = [lite, path, PROMPT, "--ignore-eos", "--max-tokens", "900"]
    processes = [subprocess.Popen(words, stdout=-1, stderr=-1) for _ in range(2)]
    try:
        for process in processes:  # the first token is there: every weight was read
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGSTOP)
        found = [mapped(process.pid, path) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for rss, pss in found:
        assert rss > 5000
        assert pss < 0.55 * rss


def test_attention_that_is_not_causal_gives_one_token(lite: Path, command: Command, tmp_path: Path) -> None:
    graph = tiny_graph()
    graph.context_len = 700  # more than a step of a causal prompt takes
    for node in graph.nodes:
        if node.op == "attention":
            node.attrs["causal"] = False
    path, ids = write_bundle(tmp_path / "x.psm", graph), [(7 * i) % 101 for i in range(600)]
    words = (lite, path, json.dumps(ids), "--ids", "--temperature", 0)
    with LLM(path, limits=ProgramLimits(max_tokens=700)) as llm:
        expected = llm.generate(ids, SamplingParams(temperature=0)).token_ids
    assert [int(word) for word in command(*words).split()] == expected
    assert len(expected) == 1
    told = failure(*words, "--max-tokens", 2, status=2)
    assert "--max-tokens: expected 1, got 2: the network's attention is not causal" in told


def test_keys_and_values_have_the_stored_type(tmp_path: Path, lite: Path, command: Command) -> None:
    """Only that of Penstock's own recipe, and only where --kv-cache leaves the choice; type by the planned memory."""

    def planned(config: Mapping[str, object], *options: object) -> int:
        config_json = json.dumps({"first": {"kv_cache": "f32"}, **config}, indent=1).encode()
        path = write_bundle(tmp_path / "tiny.psm", tiny_graph("w8a8"), segments={"config.json": config_json})
        output = command(lite, path, "1,2,3", "--ids", "--max-tokens", 200, "--ignore-eos", "--json", *options)
        return int(json.loads(output)["memory"]["plan_bytes"])

    recipe = {"recipe": {"kv_cache": "f32"}, "quant_method": "penstock", "kv_cache": "int8"}
    stored, other = {"quantization_config": recipe}, {"quantization_config": recipe | {"quant_method": "gptq"}}
    by_type = {kind: planned({}, "--kv-cache", kind) for kind in ("f32", "bf16", "int8", "int4")}
    assert by_type["int8"] < by_type["bf16"] < by_type["f32"]
    assert by_type["int4"] not in (by_type["int8"], by_type["bf16"])  # less for pages, and room to widen some of them
    assert planned(stored) == by_type["int8"]
    assert planned(stored, "--kv-cache", "f32") == by_type["f32"]
    assert planned({"quantization_config": recipe | {"kv_cache": "int4"}}) == by_type["int4"]
    for config in (
        {},
        other,
        {"quantization_config": 3, "last": recipe},
        {"quantization_config": recipe | {"kv_cache": None}},
    ):
        assert planned(config) == by_type["bf16"]
    unknown = json.dumps({"quantization_config": recipe | {"kv_cache": "int3"}}).encode()
    path = write_bundle(tmp_path / "unknown.psm", tiny_graph("w8a8"), segments={"config.json": unknown})
    assert "kv_cache" in failure(lite, path, "1,2,3", "--ids")
