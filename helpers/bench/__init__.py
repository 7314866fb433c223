"""Measure the course's kernels, and read the measurements. In notebooks: `from helpers.bench import measure`.

Measuring:
cases            shapes, types and inputs; the rows of an output that are checked
timing           times of a launch on the device; the GPU's clock and power
host_cost        how long a call takes on the host
peers            PyTorch's attention, matrix product and copy; NumPy; Numba
experiments      tile sizes, steps of a climb and changed kernels that are timed in addition to the stages
job              one measurement as closures: a launch and its check
plan, run        the jobs of a run, and running them
command          the commands `course.py ladder` and `course.py bench`

Storing and showing the results:
records          how a record's file is written and read
results          a run as a record, and as text
reading          a recorded run: its results by shape, step and tile size
steps            the recorded rows of a climb, by their ideas
plots, roofline, climb              pictures and tables for notebooks
readme, gpus     README's table and plot; the records of all GPUs side by side

Counters and machine code:
ncu, counters    Nsight Compute: running under it; its record, read
sass, sass_loop  what a compiler made of a kernel
frozen           whether a change affects any launch, any compiled text, or its machine code

harness          what all studies share: implementations timed in turns, rows, parts of a record
study, studies   the measurements for one claim each, and the command that runs them
"""

from helpers.bench.timing import Timing, measure

__all__ = ["Timing", "measure"]
