"""The profile of a running service: a route of the admin socket, and for clients with an admin key."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

from msgspec import Meta

from penstock.api_errors import RefusalError
from penstock.llm.backend import ProfileSettings
from penstock.serving.admission import deadline_s
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.operations import Operation
from penstock.serving.request_fields import Body

__all__ = ["profile_operation"]

_REPORT_S: Final = 5.0
"""Time for the report after the last step, at most half of the time of a response."""


class ProfileRequest(Body):
    """The body of a profile."""

    steps: Annotated[int, Meta(ge=1, le=1000, description="Steps to record.")] = 200
    seconds: Annotated[float, Meta(gt=0, le=600, description="Limit on the time to record.")] = 60.0
    limits: Annotated[
        bool, Meta(description="Measure the machine's limits. No step runs meanwhile, for half a second.")
    ] = False
    worker: Annotated[
        str, Meta(max_length=160, description='Name of the worker. "": the one with most open requests.')
    ] = ""


class Profiled(Body):
    """The response of a profile."""

    model: str
    worker: str
    network: str
    scheme: str
    cpu_level: str
    num_threads: int
    kv_cache: str
    weights: str
    populate_s: float
    phases: list[dict[str, Any]]
    requests: list[dict[str, float]]


async def _profile(call: Call) -> Reply:
    """Record steps of a model while it answers, and the times of the requests that end meanwhile."""
    body: ProfileRequest = call.body
    name = call.facts["model"] = call.path_values["model"]
    _check_seconds(body.seconds, deadline_s(call))
    settings = ProfileSettings(body.steps, body.seconds, body.limits)
    followers, requests = call.metrics.of_model(call.models.get(name).name).followers, list[dict[str, float]]()
    followers.append(requests)
    try:
        worker, report = await call.models.profile(name, settings, body.worker)
    finally:
        followers[:] = [one for one in followers if one is not requests]
    return json_reply({"model": name, "worker": worker, **json.loads(report), "requests": requests})


def _check_seconds(seconds: float, limit_s: float) -> None:
    """Refuse a profile that the limit on the time of a response would cut off, report and all."""
    allowed_s = limit_s - min(_REPORT_S, limit_s / 2)
    if seconds > allowed_s:
        raise RefusalError(
            400,
            f"seconds: expected at most {allowed_s:g}, because the service ends a response after {limit_s:g} s "
            f"(--max-seconds), got {seconds:g}. Set seconds; the profile ends earlier once it has its steps.",
            code="invalid_value",
            param="seconds",
        )


def profile_operation(*, is_admin: bool = False) -> Operation:
    """Return the route.  ``is_admin``: needs an admin key, as at the public listener."""
    return Operation(
        "POST", "/admin/models/{model}/profile", "profile_model", "Record where the time of steps goes.",
        _profile, Profiled, ProfileRequest, refusals=(404, 429, 501, 503, 504), is_admin=is_admin,
    )  # fmt: skip
