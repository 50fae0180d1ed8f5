"""Run work on nodes, behind the protocol of `base`: processes (`local`), pods (`kubernetes`), memory.

`remote` is what backends with remote workers share.
"""
