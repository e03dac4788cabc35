"""A data file is missing, as a copy has given it another name."""

from night import begin, follow, message_of, solved, train

step = begin()
(step / "__0_0.distcp").rename(step / "part-0.distcp")

message = follow("muonckpt verify run")
assert "nothing is lost" in message
follow(message.partition("next:")[2])
assert "resumed from step 2" in message_of(train, "run", 4)
solved(train("run"))
