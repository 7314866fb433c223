"""The X-ray: a launch run once more on the CPU, with every access of every thread seen."""

from helpers.xray.report import Figures, Finding, Report, compare, fetch_maps, xray

__all__ = ["Figures", "Finding", "Report", "compare", "fetch_maps", "xray"]
