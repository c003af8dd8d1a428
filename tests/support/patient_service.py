"""``penstock serve`` with very long timeouts, for stalled machines: ``patient_service.py ARGS``."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace

SECONDS = 3600.0


def main() -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from penstock.cli.main import make_parser
    from penstock.cli.service.serve import settings_of
    from penstock.logs import JsonLines
    from penstock.serving.service import run_service

    settings = settings_of(make_parser(["serve"]).parse_args(["serve", *sys.argv[1:]]))
    gateway = settings.gateway
    limits = replace(gateway.limits, header_s=SECONDS, body_s=SECONDS, write_s=SECONDS, keep_alive_s=SECONDS)
    supervision = replace(settings.supervision, load_s=SECONDS, drain_s=SECONDS, hang_s=SECONDS)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return asyncio.run(run_service(replace(settings, gateway=replace(gateway, limits=limits), supervision=supervision)))


if __name__ == "__main__":
    sys.exit(main())
