"""Chat templates render as in transformers, and a hostile one soon ends with an error."""

from __future__ import annotations

import dataclasses
import enum
import json
import time

import numpy as np
import pytest
from jinja2.exceptions import SecurityError

from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.text.chat_template import render_chat
from penstock.text.template_sandbox import deadline, template_environment
from tests.support.errors import raises
from tests.support.fake_model import FILES

MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "  Hi <b>&</b> 日本 "},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{%- for message in messages %}\n    {%- if loop.first and message['role'] != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}\n    {%- endif %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] %}{% continue %}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ ns.system ~ ' ' ~ m['content'].strip() }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{{ messages | tojson(indent=2) }}{{ messages[0] | tojson }}{{ '%s-%03d' % ('a', 7) }}"
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a,b'.split(',')[-1] }}{{ 'x' * 3 }}"
)


@pytest.mark.parametrize("template", [CHATML, LLAMA])
@pytest.mark.parametrize("generation", [True, False])
def test_rendered_chat_matches_transformers(template, generation):
    from transformers.utils.chat_template_utils import render_jinja_template

    expected = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=generation, **TOKENS)
    assert render_chat(template, MESSAGES, TOKENS, add_generation_prompt=generation) == expected[0][0]


def test_the_date_is_at_hand():
    assert render_chat("{{ strftime_now('%Y') }}", MESSAGES, {}) == time.strftime("%Y")


def test_a_template_refuses_messages_in_its_own_words():
    template = "{{ raise_exception('roles must alternate') }}"
    with raises(InvalidArgumentError, param="messages", match="roles must alternate"):
        render_chat(template, MESSAGES, {})


@pytest.mark.parametrize(
    ("template", "expected"),
    {
        "{{ '**{}** {a}'.format(1, a=2) }}{{ '**%s**' % 'b' }}": "**1** 2**b**",
        "{{ ([messages[0].content, 'b'] + ['c']) | join('-') }}": "Be short.-b-c",
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b * 2 }}{% endfor %}{% set x, y = 1, 2 %}{{ x - y }}": "511-1",
        "{{ {'a': 1}.items() | list }}{{ [1, 2.5] | sum }}{{ 1.25 | round(1) }}": "[('a', 1)]3.51.2",
        "{{ ' x ' | trim }}{{ 'abc'[1:] | upper }}{{ messages[1:] | length }}": "xBC3",
    }.items(),
)
def test_template_features_are_allowed(template, expected):
    assert render_chat(template, MESSAGES, {}) == expected


DEEP = "{% set a = ['x'] %}{% set b = ['x'] %}" + "{% set a = [a, a] %}{% set b = (b, b) %}" * 40


@pytest.mark.parametrize(
    "template",
    [
        DEEP + "{{ a }}",
        DEEP + "{{ a | tojson }}",
        DEEP + "{{ '{}'.format(a) }}",
        DEEP + "{{ a == b | list }}",
        "{% set a = 'x' %}" + "{% set a = {'k': a, 'l': a} %}" * 40 + "{{ a | string }}",
        "{% set a = 'x' %}" + "{% set a = dict(k=a, l=a) %}" * 40 + "{{ a }}",
        "{% set n = namespace(a='x') %}" + "{% set n.a = (n.a, n.a) %}" * 40 + "{{ n.a }}",
        "{% set x = 4294967296 %}" + "{% set x = x * x %}" * 30 + "{{ x > 3 }}",
        "{{ ('f' * 16000000) | int(0, 16) }}",
        "{{ 1.5 | round(1000000000, 'floor') }}",
        "{{ [1] | batch(2000000000, 0) | list }}",
        "{{ [1] | slice(2000000000) | list }}",
        "{{ [[1] * 1000] * 100 | batch(1) | list | batch(1, 2) }}" + DEEP + "{{ [a] | batch(1) | list }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ('%s' * 100000) | format('x' * 1000000) }}",
        "{{ ('a ' * 500000) | wordwrap(1, wrapstring='x' * 1000) }}",
        "{{ ('a ' * 8000000) | wordwrap(1) }}",
        "{{ ('www.a.b ' * 100000) | urlize(target='x' * 1000) }}",
        "{{ ('\t' * 1000000).expandtabs(1000000) }}",
        DEEP + "{{ a | pprint }}",
        DEEP + "{{ {'k': a} | xmlattr }}",
        "{% generation %}" * 60 + "{{ 'x' * 999999999 }}" + "{% endgeneration %}" * 60,
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{% generation %}{{ ns.s }}{{ ns.s }}"
        "{% endgeneration %}{% endset %}{% endfor %}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{{ dict.__class__.__mro__ }}",
        "{{ ([[1]] * 100000) | sum(start=[]) }}",
        "{{ [1] * 999999999 }}",
        "{% set x = '\"' * 1000 %}" + "{% set x = x | tojson %}" * 30,
        "{{ range(1000) | list | tojson(separators=('x' * 1000000, ':')) }}",
        "{{ 'x'.encode() * 999999999 }}",
        "{{ (5).to_bytes(999999999, 'big') }}",
        "{{ ('a' * 16000).translate({97: 'x' * 1000000}) }}",
        "{{ '{:{}}'.format('a', 999999999) }}",
        "{% set f = '{0}' * 100000 %}{{ f.format('x' * 1000000) }}",
        "{% set f = '%(a)s' * 100000 %}{{ f % {'a': 'x' * 1000000} }}",
        "{{ ('x' * 1000000).join(range(90000) | map('string')) }}",
        "{{ ('\t' * 10000).expandtabs(tabsize=1000000) }}",
        "{{ ('a' * 8000000).rfind('b' ~ 'a' * 4000000) }}",
        "{{ ('a' * 8000000) | trim('b' * 7000000 ~ 'a') }}",
        "".join(f"{{% set a{i} = 'x' * 16000000 %}}" for i in range(40)),
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ 'abc' | truncate(2, true, 'x' * 10) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * 'x' }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ 'x'.rjust(999999999) }}",
        "{{ 'x' | indent(999999999, true) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = '-'.join([ns.s, ns.s]) %}{% endfor %}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}"
        "{% for i in range(60) %}{% set ns.s = m(ns.s) %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ undefined.field }}",
        "{% if %}",
        "{{ messages[0]['content'].encode().decode('rot13').__globals__ }}",
        "{{ range(999999999) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ lipsum(n=9999) }}",
        "x" * (1 << 21),
    ],
)
def test_a_hostile_template_is_refused_in_time(template, monkeypatch):
    """Without a limit on their time some take hours."""
    monkeypatch.setattr("penstock.text.template_sandbox.MAX_SECONDS", 0.1)
    with pytest.raises((InvalidFileError, InvalidArgumentError), match="template"):
        render_chat(template, MESSAGES, {})


def test_a_late_deadline_spares_destructors(monkeypatch):
    """Python drops an exception of a destructor, and the trace function with it: nothing would end the template."""
    monkeypatch.setattr("penstock.text.template_sandbox.MAX_SECONDS", -1.0)
    ended = []

    class Value:
        def __del__(self):
            ended.append("whole")

    values = [Value()]
    with deadline():
        values.clear()
        with pytest.raises(SecurityError):
            template_environment().from_string("{{ 1 }}")
    assert ended == ["whole"]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "not empty"),
        ("hi", "list"),
        ([{"content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"role": 1}], r"messages\[1\]"),
        ([{"role": "user", "content": 7}], r"messages\[0\]: content"),
        ([{"role": "user", "contnet": "x"}], r"messages\[0\] .*'role', 'contnet'"),
        ([json], r"messages\[0\]"),
    ],
)
def test_messages_are_checked_by_name(messages, message):
    with raises(InvalidArgumentError, param="messages", match=message):
        render_chat("{{ messages }}", messages, {})


class Role(enum.StrEnum):
    USER = "user"


@dataclasses.dataclass
class Part:
    type: str
    text: str
    data: object = None


class OpenAiMessage:
    def model_dump(self):
        return {"role": Role.USER, "content": [Part("text", "hi", np.float32(1.5)), np.bool_(True)], "refusal": None}


def test_a_template_sees_only_plain_values():
    seen = "[{'role': 'user', 'content': [{'type': 'text', 'text': 'hi', 'data': 1.5}, True]}]"
    assert render_chat("{{ messages }}", [OpenAiMessage()], {}) == seen
    tokens = {"bos_token": "<s>"}
    shown = render_chat("{{ bos_token }}{{ x }}{{ y }}", MESSAGES, tokens, variables={"x": json, "bos_token": "b"})
    assert shown == "b<module>"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [print]}, "tools"),
        ({"documents": {"a": 1}}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": "thinking"}, "continue_final_message"),
    ],
)
def test_wrong_options_of_a_rendering_are_named(options, param):
    with raises(InvalidArgumentError, param=param):
        render_chat("{{ messages }}{{ thinking }}", MESSAGES, {}, **{"add_generation_prompt": False, **options})


def test_chat_answers_the_rendered_conversation(make_llm):
    llm = make_llm(files=FILES | {"chat_template.jinja": CHATML.encode()})
    prompt = llm.chat_prompt(MESSAGES)
    assert llm.tokenizer.decode(prompt) == render_chat(CHATML, MESSAGES, TOKENS)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    answer = llm.chat(MESSAGES, params)
    assert answer.prompt_token_ids == prompt
    assert answer.token_ids == llm.generate(prompt, params).token_ids
    with raises(InvalidArgumentError, param="messages"):
        llm.chat("hello")
