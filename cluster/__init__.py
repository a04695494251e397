"""The composition root: configuration, Ray shells, registry, command line. Imported by no other package."""
