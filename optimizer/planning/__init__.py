"""What is fixed between steps: matrices, their owners, the stages of exchange and what each rank sends.

Pure: no tensor is read and nothing is sent, so every rank derives the same plan.  ``matrices`` cuts a parameter into
matrices, ``units`` describes them to the planner, ``owners`` shares out the work, ``routes`` says what lies where on
the wire.  Open ``schedule`` first.
"""
