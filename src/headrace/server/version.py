"""The server's version, from the installed package: importing `headrace` itself would point up to the offline API."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("headrace")
