"""Which nests become one kernel: legality, bytes, the search, and what takes groups apart again."""
