"""Limits that the instances of a shared directory keep to together; ``docs/explanation/shared-capacity.md``.

============ ==============================================================
limits       what a tier may take, and when to make room
report       what an instance tells its collector, and hears back
accounting   the shared books of a namespace
survey       how much is there, and what was used least recently
collector    turns of the one who collects
lock         locks that the kernel frees at death
prune        the same from the command line, for any storage
============ ==============================================================
"""
