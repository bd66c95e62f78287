"""One file per engine, last in the chain: nothing outside this folder but `kvlane.bench` imports them."""
