"""The question whether an optimizer does the same on a mesh as on one process, asked of anyone's, by running it.

``trials`` steps parameters of many shapes and layouts on a few ranks; ``conform`` compares, and says why.  Open
``conform`` first.
"""
