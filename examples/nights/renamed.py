"""A module of the model has another name than when it was saved."""

from pathlib import Path

from night import Model, begin, follow, message_of, solved, train

begin()
message = message_of(train, "run", model=Model(table="tokens"))
_, _, table = message.partition("with FILE:\n")
Path("rules.toml").write_text(table)
follow(message, NEW="renamed/step-00000002", FILE="rules.toml")
assert "resumed from step 2" in message_of(train, "renamed", 3, model=Model(table="tokens"))
solved(train("renamed", model=Model(table="tokens")))
