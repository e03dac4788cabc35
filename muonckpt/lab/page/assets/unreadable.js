// The page about a checkpoint whose description cannot be read.

show(DATA.checkpoint, "its description cannot be read, so there is no map", [verdictSection({ verdict: DATA.verdict })]);
performance.mark("ready");
