"""A module of the model has another name than when it was saved."""

import re
from pathlib import Path

from night import Model, begin, follow, message_of, solved, train

begin()
message = message_of(train, "run", model=Model(table="tokens"))
_, _, table = message.partition("with FILE:\n")
Path("rules.toml").write_text(table)
[place] = re.findall(r"the run takes NEW if that is (\S+)\)", message)
follow(message.partition("):")[2], NEW=place, FILE="rules.toml")
assert "resumed from step 2" in message_of(train, "run", 3, model=Model(table="tokens"))
solved(train("run", model=Model(table="tokens")))
