"""What is measured, and the record of it. In notebooks: `from helpers.bench import measure`.

cases            shapes, types and inputs; the rows of an output that are checked
timing           how long a launch takes on the device, and at which clocks
host_cost        how long a call takes on the host
peers            PyTorch's attention, matrix product and copy; NumPy; Numba
experiments      tile sizes, steps of a climb and changed kernels that are timed beside the stages
plan, run        the measurements of a run, and doing them
results          the record as JSON and as a table
bench            the commands `course.py ladder` and `course.py bench`
readme           README's table and plot, made from the record

ncu              Nsight Compute: running under it, and reading its CSV
profile_stages   the stages, their steps and peers under Nsight Compute
counters         that record, read: what each of them makes a GPU do
xray_vs_ncu      the X-ray's counters beside the GPU's own, for the same launches
"""

from helpers.bench.timing import Timing, measure

__all__ = ["Timing", "measure"]
