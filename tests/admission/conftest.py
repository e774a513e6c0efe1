"""How long the property tests of admission may take."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=3000, stateful_step_count=100, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
