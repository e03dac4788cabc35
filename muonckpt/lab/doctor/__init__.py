"""What a program's own optimizer does to its model, what is probably not meant, and the same in ours, proved.

``built`` calls the program's function, ``treatments`` says what each parameter gets, ``suspects`` what looks wrong,
``programs`` knows the optimizers of others, ``replaced`` writes their groups as ours, and ``proof`` steps both.  This
room sees optimizer and converters, which do not see each other.  Open ``doctor`` first.
"""
