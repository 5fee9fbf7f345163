"""`python -m sharding.launch`, the same as the console script `sharding`."""

from . import main

main()
