"""Make `makeway.checkpoint` importable in jobs whose Python has no Makeway; an installed one comes first.

The folder above is the last entry of a job's PYTHONPATH, which Python searches before the installed packages. So this
package looks for another `makeway` on the rest of the path first, and becomes that one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.realpath(__file__))
_LIBRARY = os.path.dirname(_HERE)


def _installed() -> ModuleSpec | None:
    """Return the package of this name that Python would find without this folder, or None."""
    places = [place for place in sys.path if os.path.realpath(place or os.curdir) != _LIBRARY]
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = PathFinder.find_spec(__name__, places) if finder is PathFinder else find and find(__name__, None)
        if spec is not None and spec.loader is not None and spec.has_location:  # a folder without __init__.py has none
            return spec
    return None


_spec = _installed()
if _spec is not None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[__name__] = _module
    assert _spec.loader is not None
    _spec.loader.exec_module(_module)
elif not os.path.exists(os.path.join(_HERE, "checkpoint.py")):  # not a copy of the launcher, but its source
    __path__ = [os.path.dirname(os.path.dirname(_LIBRARY))]
