"""Launch and end machines of autoscaled pools within a budget.

`step` makes one step of a deployment: what a provider lists and agents report (`instances`, `transitions`), what
waiting work needs (`demand`, `sizing`, `budget`, `backoff`), and what is not needed any more (`retirement`).
"""
