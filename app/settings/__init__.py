"""Every setting of the gateway: typed, checked before torch is imported, and explained when it is wrong.

``load_settings`` is the way in: ``.env`` files, then the environment (``FAIRGATE_GROUP__NAME``), then flags
of ``vllm serve``. Read on in the order ``schema.py`` (all settings together), ``engine.py`` and ``groups.py``
(the lists), ``load.py`` (how they are gathered), ``findings.py`` (what is said when they are wrong).
May not import vllm: a wrong value is answered within 2 seconds.
"""

from .engine import EngineSettings, LoraModule
from .findings import Finding, SettingsError
from .groups import AdmissionSettings, AuthSettings, LogSettings, MetricsSettings, ServerSettings
from .load import Loaded, load_settings
from .schema import Settings, markdown_table

__all__ = [
    "AdmissionSettings",
    "AuthSettings",
    "EngineSettings",
    "Finding",
    "Loaded",
    "LogSettings",
    "LoraModule",
    "MetricsSettings",
    "ServerSettings",
    "Settings",
    "SettingsError",
    "load_settings",
    "markdown_table",
]
