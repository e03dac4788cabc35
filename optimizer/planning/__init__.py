"""The plan of a step: matrices, their owners, the stages of exchange and each rank's copies.

Pure: no tensor is read and nothing is sent, so every rank derives the same plan.  ``matrices`` describes parameters,
``residence`` says which rank has which parts of them and makes copies, ``schedule`` shares out the work, puts it
together and lays out the wires.  Open ``schedule`` first.
"""
