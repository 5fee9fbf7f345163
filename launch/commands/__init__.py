"""The commands of `sharding`, one file each.

In: the options of `config`. Out: files, and text on stdout.
"""
