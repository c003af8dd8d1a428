"""Published clients against scripted models: python -m tests.serving.openai.clients_check FOLDER.

``make check-clients`` runs it.  ``FOLDER`` has an environment with the name of each client: openai, langchain-openai,
pydantic-ai-slim and instructor, whose requirements exclude each other.  Each client calls tools in every format, and
gets answers in the shape of a class; it prints the rest of what its check covers.  The models are those of
test_tools.py.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "the cat"
FINAL = "Fine é"
PERSON = {"name": "Mia", "age": 7}


def check_openai(url: str, names: list[str], arguments: dict[str, Any]) -> str:
    """The helpers that parse answers and calls, whole and streamed."""
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str
        days: int
        near: dict[str, Any]

    class Now(BaseModel):
        pass

    class Person(BaseModel):
        name: str
        age: int

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    tools = [openai.pydantic_function_tool(Weather, name="weather"), openai.pydantic_function_tool(Now, name="now")]

    def final_of(is_streamed: bool, **body: Any) -> Any:
        if not is_streamed:
            return client.chat.completions.parse(**body).choices[0].message
        with client.chat.completions.stream(**body) as stream:
            return stream.get_final_completion().choices[0].message

    for is_streamed in (False, True):
        for name in names:
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            for step in range(3):
                message = final_of(is_streamed, model=name, messages=messages, tools=tools, max_tokens=800)
                messages.append(message)
                calls = message.tool_calls or []
                assert len(calls) == (0 if step == 2 else 2), (name, step, message)
                for call in calls:
                    parsed = call.function.parsed_arguments
                    assert parsed == (Now() if call.function.name == "now" else Weather(**arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            assert message.content == FINAL, (name, message)
        body = {"model": "json", "messages": messages[:1], "max_tokens": 200, "response_format": Person}
        assert final_of(is_streamed, **body).parsed == Person(**PERSON)
    return f"{len(names)} formats in loops of three steps, and a class in JSON, whole and streamed"


def check_langchain(url: str, names: list[str], arguments: dict[str, Any]) -> str:
    """bind_tools and with_structured_output."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class weather(BaseModel):  # noqa: N801 - the name of the tool
        """Tell the weather."""

        city: str
        days: int | None = None
        near: dict[str, Any] | None = None

    class now(BaseModel):  # noqa: N801 - the name of the tool
        """Tell the time."""

    class Person(BaseModel):
        name: str
        age: int

    def model(name: str) -> ChatOpenAI:
        return ChatOpenAI(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=800)

    def whole(bound: Any, messages: list[Any]) -> Any:
        return bound.invoke(messages)

    def streamed(bound: Any, messages: list[Any]) -> Any:
        chunks = list(bound.stream(messages))
        return sum(chunks[1:], chunks[0])

    for answer in (whole, streamed):
        for name in names:
            bound, messages = model(name).bind_tools([weather, now]), [HumanMessage(QUESTION)]
            for step in range(3):
                message = answer(bound, messages)
                messages.append(message)
                calls = [(call["name"], call["args"]) for call in message.tool_calls]
                assert calls == ([] if step == 2 else [("weather", arguments), ("now", {})]), (name, step, message)
                messages += [ToolMessage("rain", tool_call_id=call["id"]) for call in message.tool_calls]
            assert message.content == FINAL, (name, message)
    for method in ("json_schema", "json_mode"):
        assert model("json").with_structured_output(Person, method=method).invoke(QUESTION) == Person(**PERSON)
    for name in names:
        forced = model(name).with_structured_output(weather, method="function_calling")
        assert forced.invoke(QUESTION) == weather(**arguments), name
    return f"{len(names)} formats in loops of three steps, whole and streamed; a class in JSON and as a call, whole"


def check_pydantic_ai(url: str, names: list[str], arguments: dict[str, Any]) -> str:
    """Agents with tools, and agents whose answer is an object."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        name: str
        age: int

    provider, called = OpenAIProvider(base_url=url, api_key="none"), []

    def weather(city: str, days: int = 0, near: dict[str, Any] | None = None) -> str:
        """Tell the weather."""
        called.append({"city": city, "days": days, "near": near})
        return "rain"

    def now() -> str:
        """Tell the time."""
        called.append({})
        return "noon"

    async def streamed(agent: Agent[None, str]) -> str:
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    async def check() -> None:
        for name in names:
            agent = Agent(OpenAIChatModel(name, provider=provider), tools=[weather, now], model_settings=settings)
            for is_streamed in (False, True):
                called.clear()
                output = await streamed(agent) if is_streamed else (await agent.run(QUESTION)).output
                assert output == FINAL, (name, output)
                assert sorted(called, key=len) == [{}, {}, arguments, arguments], (name, called)
        for output_type in (NativeOutput(Person), PromptedOutput(Person)):
            agent = Agent(OpenAIChatModel("json", provider=provider), output_type=output_type, model_settings=settings)
            assert (await agent.run(QUESTION)).output == Person(**PERSON)

    settings: Any = {"max_tokens": 800}
    asyncio.run(check())
    return f"{len(names)} formats in loops of three steps, whole and streamed; a class in JSON, whole"


def check_instructor(url: str, names: list[str], arguments: dict[str, Any]) -> str:
    """Answers that are asked for again until they are valid, as calls; and answers in JSON, whole and streamed."""
    import instructor
    import openai
    from pydantic import BaseModel, model_validator

    attempts: list[str] = []

    class weather(BaseModel):  # noqa: N801 - the name of the tool
        """Tell the weather."""

        city: str
        days: int
        near: dict[str, Any]

        @model_validator(mode="after")
        def _only_the_third(self) -> weather:
            attempts.append(self.city)
            if len(attempts) < 3:
                raise ValueError("Ask again.")
            return self

    class Person(BaseModel):
        name: str
        age: int

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 800}
    for name in names:
        attempts.clear()
        found = instructor.from_openai(client, mode=instructor.Mode.TOOLS).create(
            model=name, response_model=weather, max_retries=3, **body
        )
        assert (found.model_dump(), len(attempts)) == (arguments, 3), (name, found)
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        patched = instructor.from_openai(client, mode=mode)
        assert patched.create(model="json", response_model=Person, **body).model_dump() == PERSON
        assert list(patched.create_partial(model="json", response_model=Person, **body))[-1].model_dump() == PERSON
    return f"{len(names)} formats in one forced call with three attempts, whole; a class in JSON, whole and streamed"


CHECKS: dict[str, Callable[[str, list[str], dict[str, Any]], str]] = {
    "openai": check_openai,
    "langchain-openai": check_langchain,
    "pydantic-ai-slim": check_pydantic_ai,
    "instructor": check_instructor,
}


def main(environments: Path) -> int:
    """Serve the models of the tests, and run each client in its environment.  Returns how many failed."""
    from penstock.text.answer.formats import TOOL_FORMATS
    from tests.support.answer_texts import ARGUMENTS, PYTHON, SPECIALS, TEXTS, script_of
    from tests.support.http_service import Service
    from tests.support.scripted_model import scripted_llm

    # Only JSON's quotes are allowed where a call is required.
    values = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in ARGUMENTS.items()]
    python = f"weather({', '.join(values)})"
    models = {}
    for name, form in TOOL_FORMATS.items():
        signs = " ".join([*form.signs[0], "<|message|>" if name == "harmony" else "</think>"])
        scripts = {step: text.replace(PYTHON, python) for step, text in {**script_of(name), 1: TEXTS[name]}.items()}
        models[name] = scripted_llm(scripts, signs, SPECIALS.get(name))
    models["json"] = scripted_llm({0: json.dumps(PERSON)}, "")
    service = Service(models)
    try:
        words = [__file__, service.url + "/v1", json.dumps([*TOOL_FORMATS]), json.dumps(ARGUMENTS)]
        commands = [[environments / client / "bin" / "python", *words, client] for client in CHECKS]
        return sum(subprocess.run(command, check=False).returncode != 0 for command in commands)
    finally:
        service.close()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(main(Path(sys.argv[1])))
    url, names, arguments, client = sys.argv[1:]
    summary = CHECKS[client](url, json.loads(names), json.loads(arguments))
    print(f"{client} {importlib.metadata.version(client)}: {summary}")
