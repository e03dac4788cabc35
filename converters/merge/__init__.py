"""The average of several checkpoints.  Open ``merged_outputs`` first.

``merged_outputs`` decides what becomes of each tensor and item; ``joined`` reads several checkpoints as one source.
"""
