"""Make, check and enter .venv: what course.py does before its packages are installed."""
