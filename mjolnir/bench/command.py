"""From the options of ``mjolnir bench`` to a report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mjolnir.bench import measure
from mjolnir.bench.ours import Knobs, Mjolnir
from mjolnir.bench.peers import Peer
from mjolnir.bench.results import Failure, Report, Row
from mjolnir.bench.shapes import DATA, HARD, ROOFLINE_TB_S, Shape
from mjolnir.bench.suites import select, suite
from mjolnir.checks import check_choice
from mjolnir.evidence import header


@dataclasses.dataclass(frozen=True)
class Options:
    """What ``mjolnir bench`` is asked for.

    Attributes:
        suite: name of a suite.
        patterns: shell-style, matched anywhere in a shape's name; none: every shape.
        data: "normal" or "hard" instead of what the suite says.
        repeat: graphs captured and timed per shape; the median is over the replays of all.
        budget_s: seconds after which no further shape is started.
        knobs: arguments of ``DecodeRunner`` that differ from its own choice.
    """

    suite: str = "core"
    patterns: tuple[str, ...] = ()
    data: str | None = None
    repeat: int = 1
    budget_s: float = 600.0
    knobs: Knobs = dataclasses.field(default_factory=Knobs)

    def shapes(self) -> list[Shape]:
        """The suite's shapes that the options leave, each once, in its order.

        Raises:
            ValueError: an unknown suite or kind of data, or a pattern without a match.
        """
        shapes = suite(self.suite)
        if self.data is not None:
            check_choice("data", self.data, DATA)
            # Hard data is bytes of an fp8 cache: other formats have no such shape.
            fitting = [shape for shape in shapes if self.data != HARD or shape.kv_format == "fp8"]
            shapes = list(dict.fromkeys(dataclasses.replace(shape, data=self.data) for shape in fitting))
        return select(shapes, self.patterns)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"patterns": list(self.patterns)}


def run_bench(
    options: Options, progress: Callable[[Row | Failure], None] = lambda _: None, peers: Sequence[Peer] = ()
) -> Report:
    """Measure on the current CUDA device.

    Raises:
        ValueError: there is no CUDA device, or an option is out of its range.
    """
    shapes = options.shapes()
    if not torch.cuda.is_available():
        raise ValueError("bench needs a CUDA device, and torch.cuda.is_available() is False: see `mjolnir doctor`")
    start = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    outcome = measure.run(
        shapes,
        device,
        ours=Mjolnir(options.knobs),
        peers=peers,
        repeat=options.repeat,
        budget_s=options.budget_s,
        progress=progress,
    )
    return Report(
        header=header(device),
        options=options.as_json(),
        roofline_tb_s=ROOFLINE_TB_S,
        rows=outcome.rows,
        failures=outcome.failures,
        skipped=outcome.skipped,
        seconds=time.monotonic() - start,
    )
