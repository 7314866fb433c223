"""The X-ray: a launch run once more on the CPU, with every access of every thread seen."""

from helpers.xray.figures import Figures
from helpers.xray.findings import Finding
from helpers.xray.render import fetch_maps
from helpers.xray.report import Report
from helpers.xray.run import compare, xray

__all__ = ["Figures", "Finding", "Report", "compare", "fetch_maps", "xray"]
