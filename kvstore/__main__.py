"""``python -m kvstore``: the command line."""

from .cli import main

main()
