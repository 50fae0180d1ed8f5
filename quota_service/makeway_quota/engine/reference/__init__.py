"""The reference engine: the rules of the policy engine in plain code, without any cache or index.

It gives the same plan as `engine.schedule`, slowly, but for the wording of messages. The property tests compare both;
`makeway-quota plan --engine reference` shows its plan.
"""

from .plan import schedule

__all__ = ["schedule"]
