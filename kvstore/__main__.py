"""``python -m kvstore``: the command line."""

import sys

try:
    from .cli import main
except KeyboardInterrupt:  # what comes later is met in there
    print("kvstore: interrupted", file=sys.stderr)
    sys.exit(130)

main()
