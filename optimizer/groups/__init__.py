"""Parameter groups of a model by explicit rules: what is unclear is refused, not guessed.

``sorting`` applies rules to a model, ``rules`` has them and the ready-made sets, ``decisions`` is the table that results.
Open ``sorting`` first.
"""
