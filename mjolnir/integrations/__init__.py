"""Mjolnir inside serving engines. Nothing here is imported by the rest of the package."""
