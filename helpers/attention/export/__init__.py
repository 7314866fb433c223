"""A stage as one file that needs nothing of the course: for CuPy and NumPy, for PyTorch, or a .cu file for nvcc.

    python3 helpers/course.py export flash_mma --causal -o flash.py

Launches and arguments are those that the stage plans (plan.py, with sizes that remember their names: sizes.py).
"""
