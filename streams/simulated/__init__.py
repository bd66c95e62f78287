"""A device that exists only on a virtual clock, and checks the order of all that is done with it.

It stands where `CpuBackend` or a CUDA device would: the executor's real threads run against it, one at a time, and
streams, links and events advance on a clock that jumps from one thing to the next (`backend`). Memory is real and
small, so that what attention read can be compared byte by byte. Every use of it is held against every other by vector
clocks (Lamport's happens-before): a race is found whichever of its two sides came first.

Attention itself is unknown to the device: whoever computes says through `launch` what that reads and writes, and
through `overwrite` what the host does to memory of its own. `engine` and `tier` do so, beside the real driver and the
real host store; `schedules` runs them at random, `explore` in every order there is.

What all this cannot see:

- Plain Python shared by threads (attributes, lists). Only calls of the backend, and locks made under `watched_locks`,
  order threads, and only there does another thread come in. A hand-over through any other lock orders nothing here
  and is reported where it is right; one through a plain attribute is not looked at where it is wrong.
- Memory touched without `launch`, `copy`, `read` or `overwrite`.
- Orders that no run came to. A run stands for every order that its own synchronisation allows, whichever came. Where
  the code under test asks and then goes another way (a flag set or not, an event fired or not, a time passed or not),
  each way has to be run; and a lock or a flag that happened to be used in between for something else orders as well
  as one that was meant to, in the runs in which it was.
- Mistakes of the engine: a mask, a position, a block table. Its stand-in here reads what its pass is told.
- Bytes that rot between the check of a layer and its copy.
- What a device does that is not ordered by streams at all: caches, the copy engine's own reordering inside one batch,
  pageable memory staged by a driver, a kernel that reads beyond what it said.
- How long anything really takes.
"""
