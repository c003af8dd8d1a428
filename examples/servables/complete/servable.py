"""Complete code with the demo's language model, which the service must serve, too: Python, model, Python."""

import textwrap

from penstock import servable

model = servable.language_model(served="demo", max_tokens=64, temperature=0.0)


@servable.stage(outputs={"prompt": "TEXT[]"})
def prepare(code):
    """Remove the common indent and trailing white space, so that the model continues after the last letter."""
    code = textwrap.dedent(code).strip()
    if not code:
        raise servable.InputError("code must not be empty")
    return code


@servable.stage(outputs={"code": "TEXT[]", "num_lines": "INT64[]"})
def finish(prompt, text):
    """Return the prompt with what the model added to it, up to the end of the function."""
    lines = [line.rstrip() for line in text.split("\n")]
    end = next((n for n, line in enumerate(lines) if n and line and not line[0].isspace()), len(lines))
    added = "\n".join(lines[:end]).rstrip()
    return {"code": prompt + added, "num_lines": added.count("\n")}


@servable.method(inputs={"code": "TEXT[]"}, outputs={"code": "TEXT[]", "num_lines": "INT64[]"})
def complete(code):
    prompt = prepare(code)
    return finish(prompt, model(prompt))
