"""The X-ray: one more run of a launch on the CPU, which records every access of every thread."""

from ..tracing import TraceEvent, TraceOptions
from .figures import Figures
from .findings import Finding
from .render import fetch_maps
from .report import Report
from .run import compare, find, xray
from .trace import Trace

__all__ = [
    "Figures",
    "Finding",
    "Report",
    "Trace",
    "TraceEvent",
    "TraceOptions",
    "compare",
    "fetch_maps",
    "find",
    "xray",
]
