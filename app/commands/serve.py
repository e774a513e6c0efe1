"""``fairgate serve``: the process around the gateway. Logging, the event loop, the exit code."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..settings import Settings


def serve(settings: Settings) -> None:
    """Run the gateway until it is told to stop.

    Raises:
        SystemExit: 1 where it could not start or go on, with the reason as the last line.
    """
    # One process, one registry. prometheus_client reads this when it is imported, and would go on
    # to share files with processes that are none of ours.
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    # Half of all series otherwise; nothing reads them.
    os.environ.setdefault("PROMETHEUS_DISABLE_CREATED_SERIES", "true")
    import uvloop

    from .. import server
    from ..core.errors import StartError
    from ..telemetry import logs
    from ..tenants import TenantsError

    logs.configure(settings.log.level, settings.log.format)
    try:
        uvloop.run(server.serve(settings))
    except (StartError, TenantsError) as error:
        print(f"fairgate: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
