"""The backend's logger, a child of vLLM's: vLLM gives handlers and a level to its own loggers only."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.mjolnir")
