"""The newest step has the name of another one."""

from night import begin, follow, message_of, solved, train

begin().rename("run/step-00000900")

message = message_of(train, "run", 3)
assert "saved as step 2, and its name is step-00000900" in message
follow(message.partition("What to do:")[2])
assert "newest whole  step-00000002" in follow("muonckpt verify run")
assert "resumed from step 2" in message_of(train, "run", 4)
solved(train("run"))
