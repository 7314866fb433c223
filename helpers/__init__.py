"""Code shared by the notebooks, the tests and the command line of the course."""

import time as _time

BEGAN = _time.monotonic()  # a notebook's first cell begins with this import
