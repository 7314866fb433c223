"""The commands of course.py, which run once everything is installed."""
