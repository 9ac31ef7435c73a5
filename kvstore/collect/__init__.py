"""Limits that the instances of a shared directory or bucket keep to together;
``docs/explanation/shared-capacity.md``.

============ ==============================================================
limits       what a tier may take, and when to make room
report       what an instance tells its collector, and hears back
accounting   what a namespace holds, and what each instance was granted
survey       how much is there, and what was used least recently
books        where accounts are kept, and who has the lead
shares       how namespaces divide the total of their root
places       books of a namespace, and of its neighbours below one root
lock         locks that the kernel frees at death
directory    books in a directory
bucket       books in a bucket
collector    turns of the one who collects
total        what its namespace gets of the root's total
clearance    making room in a root, whatever namespace has it
prune        the same from the command line, for any storage
============ ==============================================================
"""
