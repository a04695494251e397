"""How many workers each pool has: measured, decided, carried out and written down."""
