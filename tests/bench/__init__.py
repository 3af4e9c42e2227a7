"""Benchmarks: ``python -m tests.bench <name>``. Deliberately not run by pytest: they measure, and take their time."""
