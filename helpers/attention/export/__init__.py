"""A stage as one file that needs nothing of the course: for CuPy and NumPy, for PyTorch, or a .cu file for nvcc.

    python3 helpers/course.py export flash_mma --causal -o flash.py

Launches and arguments come from the stage's own plan (plan.py, with sizes that remember their names: sizes.py).
"""
