"""Kernel against oracle, over a stated matrix: what ``mjolnir verify`` runs.

compare.py  how far a result is from the oracle's, and how far it may be
matrix.py   the cases
problem.py  a case as tensors: a poisoned paged cache, queries, scales
main.py     run them, print, write the record
"""
