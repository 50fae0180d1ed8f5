"""Keep the service's records in one database: one class, each method one transaction."""

from .errors import Conflict, LeadershipLost, OutcomeUnknown, StoreError, TooMany
from .store import Store, open_store

__all__ = ["Conflict", "LeadershipLost", "OutcomeUnknown", "Store", "StoreError", "TooMany", "open_store"]
