"""Whether a checkpoint is whole: opening, audit, damage, and a diagnosis with its remedies.

Open ``audit`` first.
"""
