"""The question whether a run will resume: the user's model and optimizer, built without memory, asked as a load would.

``stand_ins`` builds them in a fake process group, with shards that take no memory; ``loaders`` says what the loaders of
other programs do with a checkpoint; ``preflight`` answers.  Open ``preflight`` first.
"""
