"""Find the Unix account of a user of the Hub, which writes users' names in small letters.

Used by the Hub's login, by the local spawner and by the local backend, so that all mean the same account.
"""

from __future__ import annotations

import pwd


def account_of_user(name: str) -> pwd.struct_passwd:
    """Return the account with this name; for a name in small letters, else the only account equal but for capitals.

    So a user `ana` gets the account `Ana`, but a user `BOSS` never the account `boss`, which is another user's.
    KeyError where no account fits, or several do.
    """
    try:
        return pwd.getpwnam(name)
    except (KeyError, ValueError):  # ValueError: a name with a NUL character
        if name != name.lower():
            raise KeyError(name) from None
        result = {entry.pw_name: entry for entry in pwd.getpwall() if entry.pw_name.lower() == name.lower()}
        if len(result) != 1:
            raise KeyError(name) from None
        return next(iter(result.values()))
