"""The question of what a step really did: two consecutive checkpoints give back the update, and hypotheses explain it.

``updates`` computes the update of a hypothesis and how far the stored weights are from it; ``hypotheses`` lists how
matrices may be cut and orthogonalised, ``search`` tries them; ``step_audit`` asks the question for all parameters.
Open ``step_audit`` first.
"""
