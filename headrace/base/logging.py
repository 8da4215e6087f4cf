"""The log of a process: one format, on standard error, whichever process writes."""

import logging
import sys


def configure_logging(level: str) -> None:
    """`level` as in `Config.log_level`. Does nothing where something else has set up logging already."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
