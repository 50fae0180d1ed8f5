"""Keep the service's records in one database: one class, each method one transaction."""

from .errors import Conflict, Deposed, StoreError, TooMany
from .store import Store, open_store

__all__ = ["Conflict", "Deposed", "Store", "StoreError", "TooMany", "open_store"]
