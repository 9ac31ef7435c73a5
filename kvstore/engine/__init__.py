"""Engines: what executes transfers. :mod:`kvstore.engine.base` is the contract of all of them."""
