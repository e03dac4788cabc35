"""The question of what a step really did: two consecutive checkpoints give back the update, and hypotheses explain it.

``updates`` computes the update of a hypothesis and how far the stored weights are from it; ``search`` tries all of
them; ``step_audit`` asks the question for all parameters.  Open ``step_audit`` first.
"""
