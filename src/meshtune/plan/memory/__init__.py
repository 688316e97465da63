"""Bytes on a rank at each event of a step; timeline.py adds up the rows of tensors.py."""
