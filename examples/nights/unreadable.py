"""The job may not read a file of the newest step, as another user owns it."""

import os
import tempfile
from pathlib import Path

from night import begin, follow, message_of, solved, train

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    file = begin() / "__0_0.distcp"
    Path(folder).chmod(0o777)
    file.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    message = message_of(train, "run", 4)
    os.seteuid(user)

    # A file that cannot be read now is no damage: the job ends, and takes no older step.
    assert "Permission denied" in message and "resumed" not in message
    follow(message.partition("To go on from step-00000001 instead: ")[2])
    assert "resumed from step 1" in message_of(train, "run", 2)
    Path("run.aside", file.parent.name).rename(file.parent)

    # Or the job gets the right to read it.
    file.chmod(0o600)
    assert "resumed from step 2" in message_of(train, "run", 4)
    solved(train("run"))
