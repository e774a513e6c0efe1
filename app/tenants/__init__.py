"""Tenants and keys: ``config/tenants.yaml``, from the text to the question "who is asking?".

Read in this order: ``schema.py`` (what may stand in the file), ``book.py`` (the file as frozen words,
found by digest), ``holder.py`` (the book of the moment, reloaded). ``edit.py``, ``splice.py`` and
``importers.py`` serve ``fairgate keys``; ``document.py`` (lines for messages) serves all.
"""

from .book import ANONYMOUS, KeyExpired, TenantBook, digest_of, load_book
from .document import TenantsError
from .holder import ReloadObserver, Tenants

__all__ = [
    "ANONYMOUS",
    "KeyExpired",
    "ReloadObserver",
    "TenantBook",
    "Tenants",
    "TenantsError",
    "digest_of",
    "load_book",
]
