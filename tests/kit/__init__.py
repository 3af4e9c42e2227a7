"""Test tools: a clock moved by hand, a harness for the group machine, hypothesis
strategies, a simulated world in which the shipped code runs (threads, time, Kafka and the client library's clients),
with processes that crash and freeze, and the checks that must hold in it.

Runs in: tests. Deliberately absent: anything that the product imports; nothing outside this folder and the tests uses
it. ``strategies`` needs hypothesis, the simulated world greenlet.
"""
