"""Time: runs a plan's copies beside a model's compute, layer by layer.

Scheduling (`executor`) stands above a `Backend` and is the same on every one; what knows an engine is in `engines`.
"""
