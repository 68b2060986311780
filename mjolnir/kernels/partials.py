"""Constants of partial results and their merge (split.py)."""

from __future__ import annotations

LOADS_IN_FLIGHT = 8
"""Splits that a thread reads at once. A round trip to L2 takes as long for 16, but the longer code, which is fetched
cold, cost more than the trips it saved."""

LOG2_TEAM = ((16, 4), (64, 3), (256, 4), (1 << 30, 5))
"""(up to so many splits, log2 of a team's members): more than 16 splits are merged in two steps, by teams of neighbours
first. The two steps take about as many round trips."""

UNSET = -1
"""The bits of an empty slot's words: a NaN, but not the one that arithmetic makes, 0x7fffffff."""
