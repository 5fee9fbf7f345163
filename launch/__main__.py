"""`python -m sharding.launch`, the same as the console script."""

from . import main

main()
