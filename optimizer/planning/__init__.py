"""What is fixed between steps: matrices, their owners, the stages of exchange and what each rank sends.

Pure: no tensor is read and nothing is sent, so every rank derives the same plan.  ``matrices`` cuts a parameter into
matrices, ``residence`` says which rank has which parts of them, ``units`` describes them to the planner, ``owners``
shares out the work, ``trips`` are a matrix's ways to its owner and back, ``routes`` says what lies where on the wire.
Open ``schedule`` first.
"""
