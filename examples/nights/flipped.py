"""A bit of the newest step is another one."""

from night import begin, follow, message_of, solved, train

step = begin()
file = step / "__0_0.distcp"
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 1
file.write_bytes(content)

# The size is right, so that only reading shows it; the job goes on from the step before.
message = message_of(train, "run", 2)
assert "is damaged" in message and "resumed from step 1" in message
assert "start the job again\n    it resumes from step-00000001" in follow(message)
solved(train("run"))
