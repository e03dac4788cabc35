"""A colleague has given the newest step another name, to keep it."""

from night import begin, follow, message_of, solved, train

begin().rename("run/best")

# Each command and the job name it; with its name back the job goes on from it.
assert "which is called best. To take that, stop and mv " in message_of(train, "run", 2)
message = follow("muonckpt verify run")
assert "missing       step 2, which is called best" in message
follow(message.partition("next:")[2])
assert "resumed from step 2" in message_of(train, "run", 4)
solved(train("run"))
