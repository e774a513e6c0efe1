"""What a test needs that is no Python package: Node, servers, tools. ``make test-services`` installs them.

Missing on a developer's machine is a skip with a notice; in CI it is a failure, so that no test vanishes
unseen.
"""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """The path of a program that the test cannot do without."""
    path = shutil.which(name)
    if path is not None:
        return path
    notice = f"{name} is not installed: make test-services"
    if os.environ.get("CI") == "true":
        pytest.fail(notice)
    pytest.skip(notice)
