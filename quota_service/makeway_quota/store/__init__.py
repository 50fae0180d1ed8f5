"""What the service knows for good: one database, one class, each method one transaction."""

from .errors import Conflict, Deposed, StoreError
from .store import Store, open_store

__all__ = ["Conflict", "Deposed", "Store", "StoreError", "open_store"]
