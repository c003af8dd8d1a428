"""Answers with tool calls and thoughts, in every format."""

from __future__ import annotations

import json

from penstock.text.answer.formats import CHANNEL_MARKERS, TOOL_FORMATS

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": ["object", "null"]}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": 'Zü"r}i<ch', "days": 3, "near": {"a": [1, None, "]}"], "b": {}}}
BERN = {"city": "Bern"}


def called(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


J = json.dumps(ARGUMENTS, ensure_ascii=False)
PYTHON = """weather(city='Zü"r}i<ch', days=3, near={'a': [1, None, "]}"], "b": {}})"""
NEAR = json.dumps(ARGUMENTS["near"])
SEP = "<｜tool▁sep｜>"
TEXTS = {
    "hermes": f"<tool_call>\n{called('weather', ARGUMENTS)}\n</tool_call>\n<tool_call>{called('now', {})}</tool_call>",
    "llama3_json": f"{called('weather', ARGUMENTS, 'parameters')}; {called('now', None, 'parameters')}",
    "pythonic": f"[{PYTHON}, now()]",
    "lfm2": f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>",
    "mistral": f"[TOOL_CALLS] [{called('weather', ARGUMENTS)}, {called('now', {})}]",
    "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{J}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nZü\"r}i<ch\n</parameter>\n<parameter=days>\n3\n"
    f"</parameter>\n<parameter=near>\n{NEAR}\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm4": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zü\"r}i<ch</arg_value>\n<arg_key>days</arg_key>\n"
    f"<arg_value>3</arg_value>\n<arg_key>near</arg_key>\n<arg_value>{NEAR}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function{SEP}weather\n```json\n{J}\n```"
    "<｜tool▁call▁end｜>\n"
    f"<｜tool▁call▁begin｜>function{SEP}now\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather{SEP}{J}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>now{SEP}{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + J + "<|call|>"
    "<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}<|call|>",
}  # fmt: skip
THOUGHTS = {
    "think": "<think>\nI <think> so\n\n</think>\n\n",
    "mistral": "[THINK]I <think> so[/THINK]",
    "cohere": "<|START_THINKING|>I <think> so<|END_THINKING|>",
    "harmony": "<|channel|>analysis<|message|>I <think> so<|end|><|start|>assistant",
}
SPECIALS = {name: [*form.markers] for name, form in TOOL_FORMATS.items() if name not in ("hermes", "glm4")}
SPECIALS["harmony"] = [*CHANNEL_MARKERS, "<|constrain|>"]
FINAL = {"harmony": "<|channel|>final<|message|>Fine é"}


def script_of(name: str) -> dict[int, str]:
    """Two calls, the same after thoughts, and a text."""
    thoughts = THOUGHTS["harmony" if name == "harmony" else "think"]
    return {0: TEXTS[name], 2: thoughts + TEXTS[name], 4: FINAL.get(name, "Fine é")}
