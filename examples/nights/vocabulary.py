"""The tokenizer has three words more, or fewer, than when the run was saved."""

import re

import torch
from night import Model, begin, message_of, train

begin()
message = message_of(train, "run", 3, model=Model(words=15))
[globs] = re.findall(r"grow=(\[.*\])\)$", message.strip())
larger = train("run", 3, model=Model(words=15), grow=eval(globs))

# The rows of the former words are those of the saved run, and so is all else.
table, *others = train("run", 3)
assert torch.equal(larger[0][:12], table) and all(map(torch.equal, larger[1:], others))

# No row is dropped: the model keeps the saved ones.
message = message_of(train, "run", 3, model=Model(words=9))
[rows] = re.findall(r"build the model with the saved shapes \('model.words.weight': \((\d+), 8\)\)", message)
assert all(map(torch.equal, train("run", 3, model=Model(words=int(rows))), [table, *others]))
print("solved")
