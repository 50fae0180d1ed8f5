"""Errors of the test cluster, each a sentence that says what is wrong and what to do."""

from __future__ import annotations


class KubeProblem(Exception):
    """The cluster cannot do what was asked; the sentence says why and what to do."""


class NotHere(KubeProblem):
    """This machine cannot run that part of the cluster, for example because the user is not root."""
