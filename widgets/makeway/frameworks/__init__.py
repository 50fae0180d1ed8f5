"""Checkpoints of trainings with PyTorch, Lightning, Transformers and accelerate, reached by `makeway.checkpoint`.

Sent along with jobs. A framework is imported inside of functions only, so that importing these modules loads none.
"""
