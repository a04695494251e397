"""The vocabulary of Baton: immutable, picklable values and pure functions on the standard library only."""
