"""What is fixed between steps: matrices, their owners, the stages of exchange and what each rank sends.

Pure: no tensor is read and nothing is sent, so every rank derives the same plan.  ``matrices`` says what a parameter
holds, ``residence`` which rank has which parts of it and which copies it makes, ``owners`` shares out the work,
``schedule`` puts it together and lays out the wires.  Open ``schedule`` first.
"""
