"""The plan of a step: matrices, their owners, the stages of exchange and each rank's copies.

No tensor is read and nothing is sent, so every rank derives the same plan.  ``matrices`` describes parameters,
``residence`` says which rank has which parts of them, ``schedule`` shares out the work.  Open ``schedule`` first.
"""
