"""The manifest of the newest step was cut; DCP's own description is whole."""

import os

from night import begin, follow, message_of, solved, train

os.truncate(begin() / "muonckpt.json", 1000)

message = follow("muonckpt verify run")
assert "damaged manifest" in message
follow(message.partition("next:")[2])
assert "newest whole  step-00000002.2" in follow("muonckpt verify run")
assert "resumed from step 2" in message_of(train, "run", 4)
solved(train("run"))
