"""Mutation testing of the package: planted faults, and the tests that catch them."""
