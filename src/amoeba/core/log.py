"""The library's logger: what it decides and why, which commands show with -v."""

import logging

logger = logging.getLogger("amoeba")
