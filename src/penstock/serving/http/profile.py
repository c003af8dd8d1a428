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
_RECORD_S: Final = 60.0
"""Limit on the time to record, if the request has none."""


class ProfileRequest(Body):
    """The body of a profile."""

    steps: Annotated[int, Meta(ge=1, le=1000, description="Steps to record.")] = 200
    seconds: Annotated[
        Annotated[float, Meta(gt=0, le=600)] | None,
        Meta(description="Limit on the time to record. Default: 60, or less if a response may not take so long."),
    ] = None
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
    settings = ProfileSettings(body.steps, _record_s(body.seconds, deadline_s(call)), body.limits)
    followers, requests = call.metrics.of_model(call.models.get(name).name).followers, list[dict[str, float]]()
    followers.append(requests)
    try:
        worker, report = await call.models.profile(name, settings, body.worker)
    finally:
        followers[:] = [follower for follower in followers if follower is not requests]
    return json_reply({"model": name, "worker": worker, **json.loads(report), "requests": requests})


def _record_s(seconds: float | None, limit_s: float) -> float:
    """Return the time to record; refuse one whose report the limit on the time of a response would cut off."""
    allowed_s = limit_s - min(_REPORT_S, limit_s / 2)
    if seconds is None:
        return min(_RECORD_S, allowed_s)
    if seconds > allowed_s:
        raise RefusalError(
            400,
            f"seconds: expected at most {allowed_s:g}, because the service ends a response after {limit_s:g} s "
            f"(--max-seconds), got {seconds:g}. Set seconds; the profile ends earlier once it has its steps.",
            code="invalid_value",
            param="seconds",
        )
    return seconds


def profile_operation(*, is_admin: bool = False) -> Operation:
    """Return the route.  ``is_admin``: needs an admin key, as at the public listener."""
    return Operation(
        "POST", "/admin/models/{model}/profile", "profile_model", "Record where the time of steps goes.",
        _profile, Profiled, ProfileRequest, refusals=(404, 429, 501, 503, 504), is_admin=is_admin,
    )  # fmt: skip
