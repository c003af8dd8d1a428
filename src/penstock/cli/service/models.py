"""``penstock models [list|load|update|unload]``: the models of a running service, over its admin socket."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.errors import InvalidArgumentError

__all__ = ["add_parser", "run"]

_ACTIONS = (
    ("list", "", "models and workers (default)"),
    ("load", "[NAME=]PATH", "load a bundle or a folder; returns when it answers"),
    ("update", "NAME=PATH", "switch a model to other weights without a failed request"),
    ("unload", "NAME", "let open requests end, then give the memory back"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser("models", help="list, load, update or unload the models of a running service")
    _add_options(parser, None, False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for action, what, note in _ACTIONS:
        one = actions.add_parser(action, help=note)
        if what:
            one.add_argument("model", metavar=what)
        _add_options(one, argparse.SUPPRESS, argparse.SUPPRESS)  # as well here as before the action
    parser.set_defaults(run=run, action="list")


def _add_options(parser: argparse.ArgumentParser, no_socket: Any, no_json: Any) -> None:
    parser.add_argument(
        "--admin-socket", type=Path, default=no_socket, metavar="PATH", help="that of penstock serve --admin-socket"
    )
    parser.add_argument("--json", action="store_true", default=no_json, help="what the service answers, as it is")


def run(args: argparse.Namespace) -> int:
    """Ask the service, and print what it answers."""
    from penstock.client.admin import AdminClient

    if args.admin_socket is None:
        raise InvalidArgumentError("--admin-socket is missing: the path that the service was given as --admin-socket")
    client = AdminClient(args.admin_socket)
    action = args.action or "list"
    if action == "list":
        answer = client.status()
    elif action == "unload":
        answer = client.unload(args.model)
    else:
        name, path = _named(args.model)
        if action == "update" and not name:
            raise InvalidArgumentError(f"update takes NAME=PATH, the model and its new weights, not {args.model!r}")
        answer = client.load(path, name) if action == "load" else client.update(name, path)
    print(json.dumps(answer) if args.json else _text(action, answer))
    return 0


def _named(text: str) -> tuple[str, str]:
    from penstock.cli.service.serve import named_model

    return named_model(text)


def _text(action: str, answer: dict[str, Any]) -> str:
    if action == "list":
        lines = [_line(model) for model in answer["models"]]
        return "\n".join(lines) if lines else "no models"
    return _line(answer) if action != "unload" else f"{answer['id']}  unloaded"


def _line(model: dict[str, Any]) -> str:
    """A model in a line: name, state, version, context, workers, requests, and what is wrong."""
    parts = [model["id"], model["state"]]
    if "version" in model:
        parts += [f"version {model['version']}", f"{model['source']}, {model['scheme']}"]
        parts.append(f"context {model['max_model_len']}")
    workers = model["workers"]
    parts.append(f"{sum(one['status'] == 'ready' for one in workers)} of {len(workers)} workers ready")
    parts.append(f"{model['num_running']} running, {model['num_waiting']} waiting")
    if restarts := sum(model["num_restarts"].values()):
        parts.append(f"{restarts} restarts")
    return "  ".join([*parts, *([model["error"]] if model["error"] else [])])
