"""``penstock models [list|load|update|unload|drain]``: manage the models of a running service over its admin socket."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.cli.options import add_parser_of
from penstock.errors import InvalidArgumentError

__all__ = ["add_parser", "run"]

_ACTIONS = (
    ("list", "", "list the models and their workers", ""),
    ("load", "[NAME=]PATH", "load a bundle or a checkpoint folder, and wait until it is ready", "code=new.psm"),
    ("update", "NAME=PATH", "replace the weights of a model without failing a request", "code=better.psm"),
    ("unload", "NAME", "wait for open requests, then free the memory of a model", "code"),
    ("drain", "NAME", "move the open requests of one worker of a model to the others, then end it", "code code-1"),
)
_MODEL_HELP = {
    "load": "path of a bundle or a checkpoint folder; NAME= sets its name",
    "update": "name of the model, and path of a bundle or a checkpoint folder with the new weights",
    "unload": "name of the model",
    "drain": "name of the model",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = add_parser_of(
        subparsers,
        "models",
        "Manage the models of a running service over the socket of its --admin-socket. (`penstock list` lists the "
        "models that were downloaded to this machine.)",
        "\n".join(_example(action, value) for action, _, _, value in _ACTIONS),
    )
    _add_options(parser, None, False)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", help="the action (default: list)")
    for action, metavar, note, value in _ACTIONS:
        subparser = actions.add_parser(
            action, help=note, description=f"{note[0].upper()}{note[1:]}.", epilog=f"example: {_example(action, value)}"
        )
        if metavar:
            subparser.add_argument("model", metavar=metavar, help=_MODEL_HELP[action])
        if action == "drain":
            subparser.add_argument("worker", metavar="WORKER", help="name of the worker, which `list` prints")
            subparser.add_argument(
                "--replace", action="store_true", help="start another worker first (default: the others remain)"
            )
        _add_options(subparser, argparse.SUPPRESS, argparse.SUPPRESS)  # accepted after the action, too
    parser.set_defaults(run=run, action="list")


def _example(action: str, value: str) -> str:
    return f"penstock models --admin-socket admin.sock {action} {value}".rstrip()


def _add_options(parser: argparse.ArgumentParser, no_socket: Any, no_json: Any) -> None:
    parser.add_argument(
        "--admin-socket",
        type=Path,
        default=no_socket,
        metavar="PATH",
        help="the socket of penstock serve --admin-socket (required)",
    )
    parser.add_argument(
        "--json", action="store_true", default=no_json, help="print the response of the service as JSON (default: text)"
    )


def run(args: argparse.Namespace) -> int:
    """Send the request to the service and print the response."""
    from penstock.client.admin import AdminClient

    if args.admin_socket is None:
        raise InvalidArgumentError("--admin-socket is required: the path given to penstock serve --admin-socket")
    client = AdminClient(args.admin_socket)
    action = args.action or "list"
    if action == "list":
        answer = client.status()
    elif action == "unload":
        answer = client.unload(args.model)
    elif action == "drain":
        answer = client.drain_worker(args.model, args.worker, replace=args.replace)
    else:
        from penstock.cli.service.serve import named_model

        name, path = named_model(args.model)
        if action == "update" and not name:
            raise InvalidArgumentError(
                f"update: expected NAME=PATH (the model and its new weights), got {args.model!r}", param="model"
            )
        answer = client.load(path, name) if action == "load" else client.update(name, path)
    print(json.dumps(answer) if args.json else _text(action, answer))
    return 0


def _text(action: str, answer: dict[str, Any]) -> str:
    if action == "list":
        lines = [line for model in answer["models"] for line in (_line(model), *map(_worker_line, model["workers"]))]
        return "\n".join(lines) if lines else "no models"
    return _line(answer) if action != "unload" else f"{answer['id']}  unloaded"


def _line(model: dict[str, Any]) -> str:
    """Describe a model in one line: name, state, version, context, workers, requests, error."""
    parts = [model["id"], model["state"]]
    if "version" in model:
        parts += [f"version {model['version']}", f"{model['source']}, {model['scheme']}"]
        parts.append(f"context {model['max_model_len']}")
    workers = model["workers"]
    num_ready = sum(worker["status"] == "ready" for worker in workers)
    parts.append(f"{num_ready} of {len(workers)} {'worker' if len(workers) == 1 else 'workers'} ready")
    parts.append(f"{model['num_running']} running, {model['num_waiting']} waiting")
    if restarts := sum(model["num_restarts"].values()):
        parts.append(f"{restarts} restarts")
    return "  ".join([*parts, *([model["error"]] if model["error"] else [])])


def _worker_line(worker: dict[str, Any]) -> str:
    num_open = worker["num_open"]
    line = f"  {worker['name']}  {worker['status']}  {num_open} open {'request' if num_open == 1 else 'requests'}"
    return f"{line}  on {worker['node']}" if worker["node"] else line
