"""The repository extension of the Open Inference Protocol: admins load and unload servables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from penstock.api_errors import FieldError, RefusalError
from penstock.config import parse_object, show
from penstock.errors import FileAccessError, InvalidFileError, NotFoundError, UnsupportedError
from penstock.serving.oip.bodies import MAX_CONFIG_CHARS
from penstock.serving.request_decoding import converted
from penstock.tensors import Methods

if TYPE_CHECKING:
    from penstock.serving.call import Call

__all__ = ["load", "unload"]

_Config = Annotated[str, Meta(max_length=MAX_CONFIG_CHARS)]


async def load(call: Call, name: str, parameters: Mapping[str, Any]) -> None:
    """Load a servable of the service's folder, or scan its folder again.

    ``parameters``: ``config``, a string with a JSON object; files are not accepted.
    """
    methods = _servables(call, name)
    config = None
    for key, value in parameters.items():
        if key != "config":
            why = " Files are not accepted over the network." if key.startswith("file:") else ""
            raise FieldError(key[:200], f"Unknown parameter: {show(key)}. Only config is accepted.{why}", "unknown")
        text: str = converted(value, _Config, "config")
        try:
            config = parse_object(text.encode(), "config")
        except InvalidFileError as error:
            raise FieldError("config", str(error)) from None
    try:
        await methods.load(name, config)
    except (InvalidFileError, FileAccessError, UnsupportedError) as error:  # an admin may see why it does not open
        raise RefusalError(400, str(error), code="invalid_model") from error


async def unload(call: Call, name: str, parameters: Mapping[str, Any]) -> None:
    """Unload a servable.  ``parameters``: ``unload_dependents``, which must be false, as servables have none."""
    methods = _servables(call, name)
    for key, value in parameters.items():
        if key != "unload_dependents":
            raise FieldError(key[:200], f"Unknown parameter: {show(key)}.", "unknown")
        if converted(value, bool, key):
            raise FieldError(key, "unload_dependents must be false: servables have no dependents", "unsupported")
    await methods.unload(name)


def _servables(call: Call, name: str) -> Methods:
    """Return the servables.  Raises a 400 error for the name of a language model."""
    call.facts["model"] = name[:128]
    if not name:
        raise RefusalError(400, "model_name is missing", param="model_name", code="missing_required_parameter")
    if any(backend.name == name for backend in call.models.list()):
        message = f"{show(name)} is a language model. Use the admin socket to change it (see `penstock models --help`)."
        raise RefusalError(400, message, param="model", code="language_model")
    if call.methods is None:
        raise NotFoundError(f"Servable {show(name)} not found. This service has no servables.")
    return call.methods
