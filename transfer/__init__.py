"""Bytes: what makes a stored KV cache what it is, where it lies, how it is copied and how fast.

Nothing here knows a device or an engine: host memory is numpy, and a copy is described, not made.
"""
