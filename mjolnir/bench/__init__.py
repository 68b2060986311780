"""``mjolnir bench``: time per call against the memory floor, on a GPU.

shapes.py   one benchmark shape, and the formulas of floor and target
suites.py   the lists of shapes, and the kernels they need
pool.py     K and V bytes, filled once and shared by all shapes
case.py     the tensors of one shape, and the error of an output against the oracle
peers.py    what can be timed: the protocol that ours and any other kernel implements
ours.py     Mjolnir behind that protocol
timing.py   CUDA-graph capture and replay times, host times
measure.py  a case measured; a suite run
results.py  rows and reports, checked, as JSON
report.py   the table
command.py  from options to a report
cli.py      the commands

benchmarks/README.md describes the method.
"""
