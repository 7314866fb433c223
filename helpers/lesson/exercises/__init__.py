"""Exercises: their texts, the %%cuda cells that grade them, hints, a learner's progress."""
