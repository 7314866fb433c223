"""What course.py does before its packages are there: it makes, checks and enters .venv."""
